// What was done, when and by whom: the audit's latest lines.

import { call, galleryPath } from "../api.js";
import { EVENTS, OUTCOMES } from "../audit_words.js";
import { fill, h } from "../dom.js";
import { toTheSecond } from "../numbers.js";
import { button, empty, field, heading, linkButton, loading, table } from "../ui.js";

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
  const until = h("input", { type: "date", value: params.until ?? "" });
  const body = h("div", {});
  const show = () =>
    fill(
      body,
      loading(
        () =>
          lines(
            { event: event.value, gallery: gallery.value.trim(), since: since.value, until: until.value },
            signal,
          ),
        "Reading the audit…",
      ),
    );
  const form = h(
    "form",
    { class: "filters", onSubmit: (submitted) => (submitted.preventDefault(), show()), onChange: show },
    field("What", event),
    field("In gallery", gallery, "Empty: everywhere"),
    field("Since", since),
    field("Until", until, "The end of that day."),
  );
  show();
  return h(
    "div",
    { class: "page" },
    heading(
      "Audit",
      "What was done, when and by whom. Lines are only ever added, and each vouches for all before it. People are named by a code that only their gallery can tell.",
      linkButton("Back to health", "#/health"),
    ),
    form,
    body,
  );
}

/** The beginning of a day of the reader's own, `later` days on; null where none is given. */
function midnight(date, later = 0) {
  if (!date) return null;
  const at = new Date(`${date}T00:00`);
  at.setDate(at.getDate() + later); // a day may have 23 hours
  return at.toISOString();
}

async function lines({ event, gallery, since, until }, signal) {
  // A key for some galleries reads theirs, and nothing else.
  const path = gallery ? `${galleryPath(gallery)}/audit` : "/v1/audit";
  const query = { event: event || null, since: midnight(since), until: midnight(until, 1), limit: PAGE };
  const place = h("div", { class: "stack audit" });
  const more = async (cursor) => {
    const page = await call("GET", path, { query: { ...query, cursor }, signal });
    if (page.lines.length === 0 && !cursor)
      return empty("docs", "No such line", "Nothing of the kind was done, or not then.");
    place.querySelector(":scope > .actions")?.remove();
    place.append(
      table(
        "Lines of the audit, the latest first",
        ["When", "What", "Outcome", "By", "Gallery", "Person", "Details"],
        page.lines.map(row),
      ),
    );
    if (page.next)
      place.append(
        h(
          "div",
          { class: "actions" },
          button("Show earlier lines", () => more(page.next)),
        ),
      );
    return place;
  };
  return await more(null);
}

const row = (line) => [
  toTheSecond(line.at),
  h("span", { title: line.event }, EVENTS[line.event] ?? line.event),
  h("span", { title: line.outcome }, OUTCOMES[line.outcome] ?? line.outcome),
  h("code", {}, line.actor),
  line.gallery ?? "",
  line.subject ? h("code", { title: line.subject }, line.subject.slice(0, 8)) : "",
  particulars(line.details),
];

/** In one line where they fit, else behind a word that opens them. */
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
