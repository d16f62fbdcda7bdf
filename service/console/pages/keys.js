// API keys: who may do what. A token is told once, when it is made.

import { all, call, key as ownKey, part, setKey } from "../api.js";
import { galleries } from "../choices.js";
import { fill, h, icon } from "../dom.js";
import { counted, when } from "../numbers.js";
import { button, confirmed, dialog, empty, field, heading, linkButton, loading, problemBox, toast } from "../ui.js";

const DAY_MS = 86_400_000;
const SCOPES = {
  identify: "Find and compare faces in photos",
  read: "See people, settings, risks and jobs",
  enroll: "Add, change and delete people",
  admin: "Everything: galleries, audit, exports, keys",
};
const LIVES = { 30: "a month", 365: "a year", "": "until it is revoked" };

export const title = () => "API keys";

export function render(params, signal) {
  const body = h("div", { class: "stack wide" });
  let ended = false;
  const show = () =>
    fill(
      body,
      loading(async () => list(await keys(ended, signal), again, tell), "Asking for the keys…"),
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
    heading(
      "API keys",
      "Who may ask the service what. Give each program and each person a key of their own, with no more than they need.",
      linkButton("Back to health", "#/health"),
      button("Make a key", begin, { kind: "primary", icon: "plus" }),
    ),
    body,
    h("label", { class: "check" }, others, " Show those that were revoked or have expired, too"),
  );
}

const keys = (ended, signal) => all("/v1/keys", "keys", { query: { ended }, signal });

function list(found, again, tell) {
  if (found.length === 0)
    return empty(
      "key",
      "No key yet",
      "As long as there is none, the service answers everybody on this computer, and nobody else. The first key closes it: from then on every request needs one.",
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
    `made ${when(one.created_at)}`,
    one.used_at ? `last used ${when(one.used_at)}` : "never used",
    one.revoked_at
      ? `revoked ${when(one.revoked_at)}`
      : one.expires_at
        ? `ends ${when(one.expires_at)}`
        : "does not end",
    one.rate !== null && `${one.rate} requests a second`,
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
          button("Replace it", async () => {
            const yes = await confirmed({
              title: `Replace the key “${one.name}”?`,
              text: "Another token is made for the same rights. The old one works for another day, so that programs can be changed over.",
              yes: "Replace it",
              danger: false,
            });
            if (yes)
              tell(
                await call("POST", `/v1/keys/${part(one.id)}/rotate`, { json: {} }),
                "The old token works for another day.",
              );
          }),
        button(
          "Revoke it",
          async () => {
            const yes = await confirmed({
              title: `Revoke the key “${one.name}”?`,
              text: `The next request with it is refused, for good.${mine ? " It is the key that you use now: this page will ask for another." : ""}`,
              yes: "Revoke it",
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

/** In a dialog, which stays where the page is drawn anew for the new key. */
function showToken(made, text) {
  const input = h("input", { type: "text", readOnly: true, value: made.token, onFocus: () => input.select() });
  const copy = async () => {
    await navigator.clipboard.writeText(made.token);
    toast("Copied.");
  };
  const box = dialog(
    `The token of “${made.name}”`,
    h("p", {}, `Copy it now: it is told here and never again. ${text}`),
    h("div", { class: "token" }, field("Token", input)),
    h(
      "div",
      { class: "actions end" },
      button("Copy", copy, { icon: "paste" }),
      button("I have it", () => box.close(), { kind: "primary" }),
    ),
  );
  // A slip beside it, or another page, would lose the token for good.
  box.classList.add("stays");
  box.addEventListener("click", (event) => event.target === box && event.stopImmediatePropagation(), true);
  input.focus();
}

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
    go.disabled = true; // a second press would make a second key
    try {
      if (json.scopes.length === 0)
        throw Object.assign(new Error("Choose at least one thing that the key may do."), {
          title: "A key for nothing",
        });
      const made = await call("POST", "/v1/keys", { json });
      form.close();
      if (first) setKey(made.token);
      tell(
        made,
        first ? "It was the first: the service asks everybody for a key from now on. This tab uses it already." : "",
      );
    } catch (error) {
      fill(told, problemBox(error));
    } finally {
      go.disabled = false;
    }
  };
  const go = h("button", { type: "submit", class: "button primary" }, "Make it");
  const line = (control, text, hint) =>
    h(
      "label",
      { class: "check" },
      control,
      h("span", {}, ` ${text}`, hint && h("span", { class: "hint" }, ` ${hint}`)),
    );
  const form = dialog(
    first ? "The first key" : "Make a key",
    h(
      "form",
      { onSubmit: send },
      first &&
        h(
          "p",
          {},
          "The first key closes the service, and may do everything: with it the others are made. Keep it in a safe place.",
        ),
      field("Whose it is", name, "A person or a program, such as “door 3”"),
      h(
        "fieldset",
        {},
        h("legend", {}, "What it may do"),
        scopes.map((one) => line(one, one.value, SCOPES[one.value])),
      ),
      !first &&
        where.length > 0 &&
        h(
          "fieldset",
          { class: "many" },
          h("legend", {}, "In which galleries"),
          h(
            "p",
            { class: "hint" },
            `None chosen: in all, also those to come. There ${where.length === 1 ? "is" : "are"} ${counted(where.length, "gallery", "galleries")}.`,
          ),
          where.map((one) => line(one, one.value)),
        ),
      field("For how long", lives),
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
