// What was done, when and by whom: the audit's latest lines.

import { call, galleryPath } from "../api.js";
import { fill, h } from "../dom.js";
import { when } from "../numbers.js";
import { button, empty, field, heading, linkButton, loading, table } from "../ui.js";

const PAGE = 50;
const SHORT = 32;
const EVENTS = {
  searched: "Searches",
  verified: "Comparisons with a person",
  templates_enrolled: "Enrolments",
  subject_put: "People made or replaced",
  subject_changed: "People changed",
  subject_merged: "People merged",
  subject_deleted: "People erased",
  template_moved: "Photos moved",
  template_deleted: "Photos erased",
  retention_applied: "Erased for their age",
  gallery_created: "Galleries made",
  gallery_updated: "Settings changed",
  gallery_deleted: "Galleries erased",
  gallery_imported: "Imports",
  gallery_exported: "Exports of galleries",
  subject_exported: "Exports of a person",
  threshold_moved: "Thresholds moved",
  job_queued: "Jobs begun",
  job_cancelled: "Jobs called off",
  key_created: "Keys made",
  key_rotated: "Keys replaced",
  key_revoked: "Keys revoked",
  access_refused: "Refused requests",
  audit_lines_lost: "Lines lost",
};

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
  const body = h("div", {});
  const show = () =>
    fill(
      body,
      loading(
        () => lines({ event: event.value, gallery: gallery.value.trim(), since: since.value }, signal),
        "Reading the audit…",
      ),
    );
  const form = h(
    "form",
    { class: "filters", onSubmit: (submitted) => (submitted.preventDefault(), show()), onChange: show },
    field("What", event),
    field("In gallery", gallery, "Empty: everywhere"),
    field("Since", since),
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

async function lines({ event, gallery, since }, signal) {
  // A key for some galleries reads theirs, and nothing else.
  const path = gallery ? `${galleryPath(gallery)}/audit` : "/v1/audit";
  const query = { event: event || null, since: since ? new Date(`${since}T00:00`).toISOString() : null, limit: PAGE };
  const place = h("div", { class: "stack audit" });
  const more = async (cursor) => {
    const page = await call("GET", path, { query: { ...query, cursor }, signal });
    if (page.lines.length === 0 && !cursor)
      return empty("docs", "No such line", "Nothing of the kind was done, or not since then.");
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
  when(line.at),
  h("code", {}, line.event),
  line.outcome,
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
