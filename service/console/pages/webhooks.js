// Webhooks: who receives which events, and whether it does. A secret is shown once, when it is created.

import { call, part } from "../api.js";
import { galleries } from "../choices.js";
import { fill, h, icon } from "../dom.js";
import { counted, when } from "../numbers.js";
import { settingsHeading } from "../reports.js";
import { button, confirmed, dialog, empty, field, loading, problemBox, secretDialog, toast } from "../ui.js";

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

export function render(params, signal) {
  const body = h("div", { class: "stack wide" });
  const show = () =>
    fill(
      body,
      loading(async () => list(await call("GET", "/v1/webhooks", { signal }), show, signal), "Loading webhooks…"),
    );
  show();
  return h(
    "div",
    { class: "page" },
    settingsHeading(
      "webhooks",
      "The service sends events, such as a stranger at a door, to the addresses listed here.",
      button("Create a webhook", () => create(signal, show), { kind: "primary", icon: "plus" }),
    ),
    body,
  );
}

function list({ data: webhooks }, again, signal) {
  if (webhooks.length === 0)
    return empty(
      "upload",
      "No webhooks yet",
      "Create one to be told about decisions, enrollments and jobs. The operator allows its host in KITH_WEBHOOK_HOSTS.",
    );
  return h(
    "ul",
    { class: "stack" },
    webhooks.map((one) => card(one, again, signal)),
  );
}

function card(one, again, signal) {
  const name = one.name ?? new URL(one.url).host;
  return h(
    "li",
    { class: "card" },
    h("h2", {}, name),
    h("p", {}, h("code", {}, one.url)),
    h(
      "p",
      { class: "row" },
      (one.types ?? ["all events"]).map((type) => h("span", { class: "tag", title: TYPES[type] }, type)),
      h("span", { class: "hint" }, about(one)),
    ),
    h("p", { role: "status" }, ...state(one)),
    h(
      "div",
      { class: "actions" },
      button("Send a test", async () => {
        const answer = await call("POST", path(one, "/test"));
        toast(answer.delivered ? `“${name}” accepted the test.` : `The test failed: ${answer.error}.`);
      }),
      button("Send all again", async () => {
        const yes = await confirmed({
          title: `Send all stored events to “${name}” again?`,
          text: "It gets the events of the last week once more, with the same ids, and is switched on if it was off.",
          yes: "Send",
        });
        if (!yes) return;
        const { replayed_count: replayed } = await call("POST", path(one, "/replay"));
        toast(replayed ? `${counted(replayed, "event")} will be sent again.` : "No events are stored.");
        again();
      }),
      button("Refresh", again),
      button(
        "Delete",
        async () => {
          const yes = await confirmed({
            title: `Delete the webhook “${name}”?`,
            text: "It receives nothing from now on, and its pending events are not sent.",
            yes: "Delete",
          });
          if (!yes) return;
          await call("DELETE", path(one));
          toast(`“${name}” was deleted.`);
          again();
        },
        { kind: "danger" },
      ),
    ),
  );
}

const path = (one, rest = "") => `/v1/webhooks/${part(one.id)}${rest}`;

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
  const [style, picture, word] = one.off
    ? ["unknown", "close", "switched off"]
    : one.failing_since
      ? ["uncertain", "jobs", "failing"]
      : ["identified", "check", "working"];
  const facts = [
    one.failing_since && `since ${when(one.failing_since)}: ${one.error}`,
    one.waiting_count > 0 && `${counted(one.waiting_count, "event")} after its position`,
  ];
  return [
    h("span", { class: `outcome ${style}` }, icon(picture), word),
    h("span", { class: "hint" }, ` ${facts.filter(Boolean).join(" · ")}`),
  ];
}

async function create(signal, tell) {
  const known = (await galleries(signal)) ?? [];
  const url = h("input", { type: "url", required: true, maxLength: 2048, autocomplete: "off" });
  const name = h("input", { type: "text", maxLength: 128, autocomplete: "off" });
  const risk = h("input", { type: "number", min: 0, max: 1, step: "any" });
  const box = (value) => h("input", { type: "checkbox", value, "aria-label": value });
  const types = Object.keys(TYPES).map(box);
  const outcomes = Object.keys(OUTCOMES).map(box);
  const where = known.map((gallery) => box(gallery.name));
  const told = h("div", { role: "alert" });
  const chosen = (boxes) => {
    const values = boxes.filter((one) => one.checked).map((one) => one.value);
    return values.length ? values : null;
  };
  const send = async (event) => {
    event.preventDefault();
    go.disabled = true; // a second click would create a second webhook
    try {
      const json = {
        url: url.value.trim(),
        name: name.value.trim() || null,
        types: chosen(types),
        outcomes: chosen(outcomes),
        galleries: chosen(where),
        min_risk: risk.value === "" ? null : Number(risk.value),
      };
      const made = await call("POST", "/v1/webhooks", { json });
      form.close();
      tell();
      secretDialog("The secret of the webhook", "Secret", made.secret, "The receiver verifies signatures with it.");
    } catch (error) {
      fill(told, problemBox(error));
    } finally {
      go.disabled = false;
    }
  };
  const go = h("button", { type: "submit", class: "button primary" }, "Create");
  const choices = (legend, boxes, hints, hint) =>
    h(
      "fieldset",
      { class: "many" },
      h("legend", {}, legend),
      h("p", { class: "hint" }, hint),
      boxes.map((one) =>
        h(
          "label",
          { class: "check" },
          one,
          h("span", {}, ` ${one.value}`, h("span", { class: "hint" }, ` ${hints[one.value] ?? ""}`)),
        ),
      ),
    );
  const form = dialog(
    "Create a webhook",
    h(
      "form",
      { onSubmit: send },
      field("Address", url, "A host that KITH_WEBHOOK_HOSTS allows"),
      field("Name", name, "Such as “alarm at the door”"),
      choices("Events", types, TYPES, "Without a choice: all."),
      choices("Outcomes of decisions", outcomes, OUTCOMES, "Without a choice: all."),
      where.length > 0 && choices("Galleries", where, {}, "Without a choice: all, also future ones."),
      field("Least false alarm probability of decisions", risk, "Empty: all. 0.01 leaves out sure identifications."),
      told,
      h(
        "div",
        { class: "actions end" },
        h("button", { type: "button", class: "button plain", onClick: () => form.close() }, "Cancel"),
        go,
      ),
    ),
  );
}
