// API keys and their scopes. A token is shown once, when it is created.

import { all, call, key as ownKey, part, setKey } from "../api.js";
import { galleries } from "../choices.js";
import { ask, careful, secretDialog } from "../dialogs.js";
import { h } from "../dom.js";
import { counted, when } from "../numbers.js";
import { renewedList, settingsHeading } from "../reports.js";
import { choice, field, several, textInput, ticked } from "../forms.js";
import { button, empty, outcome, toast } from "../ui.js";

const DAY_MS = 86_400_000;
const SCOPES = {
  identify: "Detect, identify and compare faces",
  read: "Read people, settings, risks and jobs",
  enroll: "Add, change and delete people",
  vectors: "With the others: send embeddings, choose risks, see exact similarities",
  admin: "Everything: galleries, audit, exports, keys",
};
const LIVES = [
  ["30", "a month"],
  ["365", "a year"],
  ["", "unlimited time"],
];
const NONE =
  "Without keys the service answers only requests from this computer. After you create the first key, each request needs one.";

export const title = () => "API keys";

export function render(params, signal) {
  const look = () => list.look();
  const others = h("input", { type: "checkbox", onChange: look });
  const load = () => keys(others.checked, signal);
  const nothing = () => empty("key", "No keys yet", NONE);
  const list = renewedList("ul.stack", load, (one) => card(one, look), nothing, signal);
  return h("div.page", [
    settingsHeading("keys", "Create one key per program or person, with only the scopes it needs.", [
      button("Create a key", () => create(signal, look), { kind: "primary", icon: "plus" }),
    ]),
    list.elements,
    ticked(others, "Show revoked and expired keys"),
  ]);
}

const keys = (ended, signal) => all("/v1/keys", { query: { ended }, signal });

function ends({ revoked_at: revoked, expires_at: expires }) {
  if (revoked) return `revoked ${when(revoked)}`;
  return expires ? `expires ${when(expires)}` : "does not expire";
}

function card(one, again) {
  const active = one.state === "active";
  const mine = ownKey()?.includes(one.id);
  const used = one.used_at ? `last used ${when(one.used_at)}` : "never used";
  const replacing = () => [
    `Replace the key “${one.name}”?`,
    "A new token gets the same scopes. The old token works for one more day.",
    "Replace",
    { danger: false },
  ];
  const replace = async () => {
    const made = await call("POST", `/v1/keys/${part(one.id)}/rotate`, { json: {} });
    showToken(made, "The old token works for one more day.");
    again();
  };
  const revoking = () => [
    `Revoke the key “${one.name}”?`,
    `The service refuses this key from now on. This cannot be undone.${mine ? " You use this key now: the page will ask for another one." : ""}`,
    "Revoke",
  ];
  const revoke = async () => {
    await call("DELETE", `/v1/keys/${part(one.id)}`);
    toast(`“${one.name}” was revoked.`);
    again();
  };
  return h("li.card", [
    h("div.row.between", [
      h("h2", [one.name, mine && " (yours)"]),
      outcome(active ? "identified" : "", active ? "check" : "close", one.state),
    ]),
    h("p.row", [
      one.scopes.map((scope) => h("span.tag", { title: SCOPES[scope] }, scope)),
      h("span.hint", one.galleries === null ? "in all galleries" : `in ${one.galleries.join(", ")}`),
    ]),
    h("p.hint", [`created ${when(one.created_at)} · ${used} · ${ends(one)} · `, h("code", one.id)]),
    (active || one.state === "altered") &&
      h("div.actions", [
        active && !one.revoked_at && careful("Replace", replacing, replace, { kind: "plain" }),
        careful("Revoke", revoking, revoke),
      ]),
  ]);
}

const showToken = (made, text) => secretDialog(`The token of “${made.name}”`, "Token", made.token, text);

async function create(signal, again) {
  const known = (await galleries(signal)) ?? [];
  const first = ownKey() === null && (await keys(true, signal)).length === 0;
  const name = textInput({ required: true, maxLength: 128 });
  const on = [first ? "admin" : "identify"];
  const scopes = several("Scopes", null, Object.keys(SCOPES), { hints: SCOPES, on, disabled: first });
  const are = `There ${known.length === 1 ? "is" : "are"} ${counted(known.length, "gallery", "galleries")}.`;
  const names = known.map((gallery) => gallery.name);
  const where = several("Galleries", `Without a choice: all galleries, also future ones. ${are}`, names);
  const lives = choice(LIVES);
  const elements = [
    first && h("p", "The first key has all scopes. Use it to create others. From then on each request needs a key."),
    field("Owner", name, "A person or a program, such as “door 3”"),
    scopes,
    !first && known.length > 0 && where,
    field("Valid for", lives),
  ];
  ask(first ? "Create the first key" : "Create a key", "Create", elements, async () => {
    if (scopes.chosen() === null) return "Choose at least one scope.";
    const made = await call("POST", "/v1/keys", {
      json: {
        name: name.value.trim(),
        scopes: scopes.chosen(),
        galleries: where.chosen(),
        expires_at: lives.value ? new Date(Date.now() + lives.value * DAY_MS).toISOString() : null,
      },
    });
    return () => {
      if (first) setKey(made.token);
      showToken(made, first ? "It is the first key: each request needs a key now. This tab already uses it." : "");
      again();
    };
  });
}
