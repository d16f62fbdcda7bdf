// The latest lines of the audit log, with filters.

import { call, galleryPath } from "../api.js";
import { EVENTS, sentence } from "../audit_words.js";
import { fill, h } from "../dom.js";
import { toTheSecond } from "../numbers.js";
import { settingsHeading } from "../reports.js";
import { button, empty, field, loading, table } from "../ui.js";

const PAGE = 50;
const SHORT = 32;

export const title = () => "Audit";

export function render(params, signal) {
  const event = h(
    "select",
    {},
    h("option", { value: "" }, "Everything"),
    Object.entries(EVENTS).map(([value, text]) => h("option", { value, selected: value === params.event }, text)),
  );
  const gallery = h("input", { type: "text", value: params.gallery ?? "", autocomplete: "off", spellcheck: false });
  const since = h("input", { type: "date", value: params.since ?? "" });
  const actor = h("input", { type: "text", value: params.actor ?? "", autocomplete: "off", spellcheck: false, placeholder: "key:3f2a9c01d2e4" });
  const person = h("input", { type: "text", value: params.subject ?? "", autocomplete: "off", spellcheck: false });
  const until = h("input", { type: "date", value: params.until ?? "" });
  const body = h("div", {});
  const show = () =>
    fill(
      body,
      loading(
        () =>
          lines(
            {
              event: event.value,
              gallery: gallery.value.trim(),
              subject: person.value.trim(),
              actor: actor.value.trim(),
              since: since.value,
              until: until.value,
            },
            signal,
          ),
        "Reading the audit…",
      ),
    );
  const form = h(
    "form",
    { class: "filters", onSubmit: (submitted) => (submitted.preventDefault(), show()), onChange: show },
    field("What", event),
    field("In gallery", gallery, "Empty: all galleries"),
    field("About the person", person, "An id. Needs a gallery."),
    field("By", actor, "A key, operator, anonymous or service."),
    field("Since", since),
    field("Until", until, "Including this day."),
  );
  show();
  return h(
    "div",
    { class: "page" },
    settingsHeading(
      "audit",
      "Who did what, and when. The log is append-only, and each line has the hash of the previous line. People appear as codes that only their gallery can resolve.",
    ),
    form,
    body,
  );
}

/** The start of a local day, plus `later` days; null without a date. */
function midnight(date, later = 0) {
  if (!date) return null;
  const at = new Date(`${date}T00:00`);
  at.setDate(at.getDate() + later); // a day may have 23 hours
  return at.toISOString();
}

async function lines({ event, gallery, subject, actor, since, until }, signal) {
  // Keys for some galleries can read only those.
  const path = gallery ? `${galleryPath(gallery)}/audit` : "/v1/audit";
  const about = gallery ? { subject: subject || null } : {};
  const query = { ...about, event: event || null, actor: actor || null, since: midnight(since), until: midnight(until, 1), limit: PAGE };
  const place = h("div", { class: "stack audit" });
  const more = async (cursor) => {
    const page = await call("GET", path, { query: { ...query, cursor }, signal });
    if (page.data.length === 0 && !cursor)
      return empty("docs", "No matching lines", "Change the filters.");
    place.querySelector(":scope > .actions")?.remove();
    place.append(
      table(
        "Audit lines, newest first",
        ["When", "What", "By", "Details"],
        page.data.map(row),
      ),
    );
    if (page.next)
      place.append(
        h(
          "div",
          { class: "actions" },
          button("Show older lines", () => more(page.next)),
        ),
      );
    return place;
  };
  return await more(null);
}

const row = (line) => [
  toTheSecond(line.at),
  h("span", { title: `${line.event}: ${line.outcome}` }, sentence(line)),
  h("code", {}, line.actor),
  particulars({ ...(line.subject && { subject: line.subject }), ...line.details }),
];

/** Details in one line if they fit, otherwise folded. */
function particulars(details) {
  const said = Object.entries(details).map(([name, value]) => `${name}: ${JSON.stringify(value)}`);
  const text = said.join(", ");
  if (text.length <= SHORT) return h("code", {}, text);
  return h(
    "details",
    {},
    h("summary", {}, Object.keys(details).join(", ")),
    h("pre", {}, JSON.stringify(details, null, 1)),
  );
}
