// API keys and their scopes. A token is shown once, when it is created.

import { all, call, key as ownKey, part, setKey } from "../api.js";
import { galleries } from "../choices.js";
import { fill, h, icon } from "../dom.js";
import { counted, when } from "../numbers.js";
import { settingsHeading } from "../reports.js";
import { button, confirmed, dialog, empty, field, loading, problemBox, secretDialog, toast } from "../ui.js";

const DAY_MS = 86_400_000;
const SCOPES = {
  identify: "Detect, identify and compare faces",
  read: "Read people, settings, risks and jobs",
  enroll: "Add, change and delete people",
  vectors: "With the others: send embeddings, choose risks, see exact similarities",
  admin: "Everything: galleries, audit, exports, keys",
};
const LIVES = { 30: "a month", 365: "a year", "": "unlimited time" };

export const title = () => "API keys";

export function render(params, signal) {
  const body = h("div", { class: "stack wide" });
  let ended = false;
  const show = () =>
    fill(
      body,
      loading(async () => list(await keys(ended, signal), again, tell), "Loading keys…"),
    );
  const again = () => show();
  const tell = (made, text) => {
    showToken(made, text);
    show();
  };
  const begin = () => create(signal, tell);
  const others = h("input", { type: "checkbox", onChange: () => ((ended = others.checked), show()) });
  show();
  return h(
    "div",
    { class: "page" },
    settingsHeading(
      "keys",
      "API keys control access to the service. Create one key per program or person, with only the scopes it needs.",
      button("Create a key", begin, { kind: "primary", icon: "plus" }),
    ),
    body,
    h("label", { class: "check" }, others, " Show revoked and expired keys"),
  );
}

const keys = (ended, signal) => all("/v1/keys", { query: { ended }, signal });

function list(found, again, tell) {
  if (found.length === 0)
    return empty(
      "key",
      "No keys yet",
      "Without keys the service answers only requests from this computer. After you create the first key, each request needs one.",
    );
  return h(
    "ul",
    { class: "stack" },
    found.map((one) => card(one, again, tell)),
  );
}

function card(one, again, tell) {
  const active = one.state === "active";
  const mine = ownKey()?.includes(one.id);
  const facts = [
    `created ${when(one.created_at)}`,
    one.used_at ? `last used ${when(one.used_at)}` : "never used",
    one.revoked_at
      ? `revoked ${when(one.revoked_at)}`
      : one.expires_at
        ? `expires ${when(one.expires_at)}`
        : "does not expire",
  ];
  return h(
    "li",
    { class: "card" },
    h(
      "div",
      { class: "row between" },
      h("h2", {}, one.name, mine && " (yours)"),
      h("p", { class: `outcome ${active ? "identified" : ""}` }, icon(active ? "check" : "close"), one.state),
    ),
    h(
      "p",
      { class: "row" },
      one.scopes.map((scope) => h("span", { class: "tag", title: SCOPES[scope] }, scope)),
      h("span", { class: "hint" }, one.galleries === null ? "in all galleries" : `in ${one.galleries.join(", ")}`),
    ),
    h("p", { class: "hint" }, facts.filter(Boolean).join(" · "), " · ", h("code", {}, one.id)),
    (active || one.state === "altered") &&
      h(
        "div",
        { class: "actions" },
        active &&
          !one.revoked_at &&
          button("Replace", async () => {
            const yes = await confirmed({
              title: `Replace the key “${one.name}”?`,
              text: "A new token gets the same scopes. The old token works for one more day.",
              yes: "Replace",
              danger: false,
            });
            if (yes)
              tell(
                await call("POST", `/v1/keys/${part(one.id)}/rotate`, { json: {} }),
                "The old token works for one more day.",
              );
          }),
        button(
          "Revoke",
          async () => {
            const yes = await confirmed({
              title: `Revoke the key “${one.name}”?`,
              text: `The service refuses this key from now on. This cannot be undone.${mine ? " You use this key now: the page will ask for another one." : ""}`,
              yes: "Revoke",
            });
            if (!yes) return;
            await call("DELETE", `/v1/keys/${part(one.id)}`);
            toast(`“${one.name}” was revoked.`);
            again();
          },
          { kind: "danger" },
        ),
      ),
  );
}

const showToken = (made, text) => secretDialog(`The token of “${made.name}”`, "Token", made.token, text);

async function create(signal, tell) {
  const known = (await galleries(signal)) ?? [];
  const first = ownKey() === null && (await keys(true, signal)).length === 0;
  const name = h("input", { type: "text", required: true, maxLength: 128, autocomplete: "off" });
  const box = (value, text, checked = false) =>
    h("input", { type: "checkbox", value, checked, disabled: first, "aria-label": text });
  const scopes = Object.keys(SCOPES).map((scope) =>
    box(scope, scope, first ? scope === "admin" : scope === "identify"),
  );
  const where = known.map((gallery) => box(gallery.name, gallery.name));
  const lives = h(
    "select",
    {},
    Object.entries(LIVES)
      .sort()
      .map(([days, text]) => h("option", { value: days }, text)),
  );
  const told = h("div", { role: "alert" });
  const chosen = (boxes) => boxes.filter((one) => one.checked).map((one) => one.value);
  const send = async (event) => {
    event.preventDefault();
    const names = chosen(where);
    const json = {
      name: name.value.trim(),
      scopes: chosen(scopes),
      galleries: names.length ? names : null,
      expires_at: lives.value ? new Date(Date.now() + lives.value * DAY_MS).toISOString() : null,
    };
    go.disabled = true; // a second click would create a second key
    try {
      if (json.scopes.length === 0) throw Object.assign(new Error("Choose at least one scope."), { title: "No scope" });
      const made = await call("POST", "/v1/keys", { json });
      form.close();
      if (first) setKey(made.token);
      tell(made, first ? "It is the first key: each request needs a key now. This tab already uses it." : "");
    } catch (error) {
      fill(told, problemBox(error));
    } finally {
      go.disabled = false;
    }
  };
  const go = h("button", { type: "submit", class: "button primary" }, "Create");
  const line = (control, text, hint) =>
    h(
      "label",
      { class: "check" },
      control,
      h("span", {}, ` ${text}`, hint && h("span", { class: "hint" }, ` ${hint}`)),
    );
  const form = dialog(
    first ? "Create the first key" : "Create a key",
    h(
      "form",
      { onSubmit: send },
      first &&
        h(
          "p",
          {},
          "The first key has all scopes. Use it to create the others, and keep it safe. From then on each request needs a key.",
        ),
      field("Owner", name, "A person or a program, such as “door 3”"),
      h(
        "fieldset",
        {},
        h("legend", {}, "Scopes"),
        scopes.map((one) => line(one, one.value, SCOPES[one.value])),
      ),
      !first &&
        where.length > 0 &&
        h(
          "fieldset",
          { class: "many" },
          h("legend", {}, "Galleries"),
          h(
            "p",
            { class: "hint" },
            `Without a choice: all galleries, also future ones. There ${where.length === 1 ? "is" : "are"} ${counted(where.length, "gallery", "galleries")}.`,
          ),
          where.map((one) => line(one, one.value)),
        ),
      field("Valid for", lives),
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
