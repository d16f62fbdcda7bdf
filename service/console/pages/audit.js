// The latest lines of the audit log, with filters.

import { all, call, galleryPath } from "../api.js";
import { EVENTS } from "../audit_words.js";
import { fill, h } from "../dom.js";
import { toTheSecond } from "../numbers.js";
import { pages, settingsHeading } from "../reports.js";
import { choice, field, textInput } from "../forms.js";
import { empty, folded, table } from "../ui.js";

const PAGE = 50;
const SHORT = 32;

const LEAD = "Who did what, and when. People appear as codes that only their gallery can resolve.";

export const title = () => "Audit";

export function render(params, signal) {
  const events = [["", "Everything"], ...Object.entries(EVENTS)];
  const date = (value = "") => h("input", { type: "date", value });
  const fields = {
    event: choice(events, { value: params.event ?? "" }),
    gallery: textInput({ value: params.gallery ?? "" }),
    subject: textInput({ value: params.subject ?? "" }),
    actor: textInput({ value: params.actor ?? "", placeholder: "key:3f2a9c01d2e4" }),
    since: date(params.since),
    until: date(params.until),
  };
  const body = h("div.audit");
  const show = () => {
    const values = Object.entries(fields).map(([name, input]) => [name, input.value.trim()]);
    fill(body, lines(Object.fromEntries(values), signal));
  };
  const form = h("form.filters", { onSubmit: (event) => (event.preventDefault(), show()), onChange: show }, [
    field("What", fields.event),
    field("In gallery", fields.gallery, "Empty: all galleries"),
    field("About the person", fields.subject, "An id. Needs a gallery."),
    field("By", fields.actor, "A key, operator, anonymous or service."),
    field("Since", fields.since),
    field("Until", fields.until, "Including this day."),
  ]);
  show();
  return h("div.page", [
    settingsHeading("audit", LEAD),
    folded("Filter", form, { open: Object.values(fields).some((field) => field.value !== "") }),
    body,
  ]);
}

/** The start of a local day, plus `later` days; null without a date. */
function midnight(date, later = 0) {
  if (!date) return null;
  const at = new Date(`${date}T00:00`);
  at.setDate(at.getDate() + later); // a day may have 23 hours
  return at.toISOString();
}

function lines({ event, gallery, subject, actor, since, until }, signal) {
  // Keys for some galleries can read only those.
  const path = gallery ? `${galleryPath(gallery)}/audit` : "/v1/audit";
  const about = gallery ? { subject: subject || null } : {};
  const span = { since: midnight(since), until: midnight(until, 1) };
  const query = { ...about, event: event || null, actor: actor || null, ...span, limit: PAGE };
  const names = new Map(); // of keys, by their ids
  const ask = async (cursor) => {
    const page = await call("GET", path, { query: { ...query, cursor }, signal });
    if (!gallery && names.size === 0 && page.data.some((line) => line.actor.startsWith("key:")))
      for (const key of await all("/v1/keys", { query: { ended: true }, signal })) names.set(key.id, key.name);
    return page;
  };
  const shown = (data) =>
    table(
      "Audit lines, newest first",
      ["When", "What", "By", "Details"],
      data.map((line) => row(line, names)),
    );
  const nothing = empty("docs", "No matching lines", "Change the filters.");
  return pages(ask, shown, nothing);
}

const row = ({ at, event, outcome, gallery, actor: by, subject, details }, names) => [
  toTheSecond(at),
  h("span", { title: `${event}: ${outcome}` }, [
    EVENTS[event] ?? event,
    gallery && ` in “${gallery}”`,
    ["done", ""].includes(outcome) ? "" : `: ${outcome.replaceAll("_", " ")}`,
  ]),
  h("span", { title: by }, actor(by, names)),
  particulars({ ...(subject && { subject }), ...details }),
];

const ACTORS = { operator: "Operator", anonymous: "Without a key", service: "Kith itself" };
const actor = (name, names) => ACTORS[name] ?? names.get(name.replace("key:", "")) ?? name.replace("key:", "Key ");

/** Details in one line if they fit, otherwise folded. */
function particulars(details) {
  const said = Object.entries(details).map(([name, value]) => `${name}: ${JSON.stringify(value)}`);
  const text = said.join(", ");
  if (text.length <= SHORT) return h("code", text);
  return folded(Object.keys(details).join(", "), h("pre", JSON.stringify(details, null, 1)));
}
