// Webhooks: who receives which events, and whether it does. A secret is shown once, when it is created.

import { call, part } from "../api.js";
import { galleries } from "../choices.js";
import { h } from "../dom.js";
import { counted, when } from "../numbers.js";
import { listed, settingsHeading } from "../reports.js";
import { ask, button, confirmed, empty, field, outcome, secretDialog, several, textInput, toast } from "../ui.js";

const TYPES = {
  decision: "A face was identified, or not",
  enrollment: "Photos of a person were stored",
  stranger_first_seen: "A new stranger",
  stranger_seen_again: "A stranger came back",
  threshold_moved: "A gallery’s threshold changed",
  drift: "Decisions became unlike the calibration",
  job_finished: "A job ended",
};
const OUTCOMES = { identified: "A known person", uncertain: "Perhaps a known person", unknown: "A stranger" };
export const title = () => "Webhooks";

const NONE =
  "Create one to be told about decisions, enrollments and jobs. The operator allows its host in KITH_WEBHOOK_HOSTS.";

export function render(params, signal) {
  const load = async () => (await call("GET", "/v1/webhooks", { signal })).data;
  const list = listed(load, card, empty("upload", "No webhooks yet", NONE), "Loading webhooks…");
  return h("div.page", [
    settingsHeading(
      "webhooks",
      "The service sends events, such as a stranger at a door, to the addresses listed here.",
      button("Create a webhook", () => create(signal, list.show), { kind: "primary", icon: "plus" }),
    ),
    list,
  ]);
}

function card(one, again) {
  const name = one.name ?? new URL(one.url).host;
  const path = (rest = "") => `/v1/webhooks/${part(one.id)}${rest}`;
  const test = async () => {
    const answer = await call("POST", path("/test"));
    toast(answer.delivered ? `“${name}” accepted the test.` : `The test failed: ${answer.error}.`);
  };
  const replay = async () => {
    const yes = await confirmed(
      `Send all stored events to “${name}” again?`,
      "It gets the events of the last week once more, with the same ids, and is switched on if it was off.",
      "Send",
    );
    if (!yes) return;
    const { replayed_count: replayed } = await call("POST", path("/replay"));
    toast(replayed ? `${counted(replayed, "event")} will be sent again.` : "No events are stored.");
    again();
  };
  const remove = async () => {
    const yes = await confirmed(
      `Delete the webhook “${name}”?`,
      "It receives nothing from now on, and its pending events are not sent.",
      "Delete",
    );
    if (!yes) return;
    await call("DELETE", path());
    toast(`“${name}” was deleted.`);
    again();
  };
  return h("li.card", [
    h("h2", name),
    h("p", h("code", one.url)),
    h("p.row", [
      (one.types ?? ["all events"]).map((type) => h("span.tag", { title: TYPES[type] }, type)),
      h("span.hint", about(one)),
    ]),
    h("p", { role: "status" }, state(one)),
    h("div.actions", [
      button("Send a test", test),
      button("Send all again", replay),
      button("Refresh", again),
      button("Delete", remove, { kind: "danger" }),
    ]),
  ]);
}

function about(one) {
  const facts = [
    one.galleries === null ? "of all galleries" : `of ${one.galleries.join(", ")}`,
    one.outcomes && `only decisions ${one.outcomes.join(", ")}`,
    one.min_risk !== null && `from a false alarm probability of ${one.min_risk}`,
    `since ${when(one.created_at)}`,
  ];
  return facts.filter(Boolean).join(" · ");
}

function state(one) {
  const failing = one.failing_since && `since ${when(one.failing_since)}: ${one.error}`;
  const waiting = one.waiting_count > 0 && `${counted(one.waiting_count, "event")} after its position`;
  const [kind, picture, word] = one.off
    ? ["unknown", "close", "switched off"]
    : failing
      ? ["uncertain", "jobs", "failing"]
      : ["identified", "check", "working"];
  return [outcome(kind, picture, word), h("span.hint", ` ${[failing, waiting].filter(Boolean).join(" · ")}`)];
}

async function create(signal, again) {
  const known = (await galleries(signal)) ?? [];
  const url = h("input", { type: "url", required: true, maxLength: 2048, autocomplete: "off" });
  const name = textInput({ maxLength: 128 });
  const risk = h("input", { type: "number", min: 0, max: 1, step: "any" });
  const types = several("Events", "Without a choice: all.", Object.keys(TYPES), { hints: TYPES });
  const outcomes = several("Outcomes of decisions", "Without a choice: all.", Object.keys(OUTCOMES), {
    hints: OUTCOMES,
  });
  const names = known.map((gallery) => gallery.name);
  const where = several("Galleries", "Without a choice: all, also future ones.", names);
  const elements = [
    field("Address", url, "A host that KITH_WEBHOOK_HOSTS allows"),
    field("Name", name, "Such as “alarm at the door”"),
    types,
    outcomes,
    names.length > 0 && where,
    field("Least false alarm probability of decisions", risk, "Empty: all. 0.01 leaves out sure identifications."),
  ];
  ask("Create a webhook", "Create", elements, async () => {
    const made = await call("POST", "/v1/webhooks", {
      json: {
        url: url.value.trim(),
        name: name.value.trim() || null,
        types: types.chosen(),
        outcomes: outcomes.chosen(),
        galleries: where.chosen(),
        min_risk: risk.value === "" ? null : Number(risk.value),
      },
    });
    return () => {
      again();
      secretDialog("The secret of the webhook", "Secret", made.secret, "The receiver verifies signatures with it.");
    };
  });
}
