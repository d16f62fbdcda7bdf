// The latest lines of the audit log, with filters.

import { all, call, galleryPath } from "../api.js";
import { EVENTS, sentence } from "../audit_words.js";
import { fill, h } from "../dom.js";
import { toTheSecond, whole } from "../numbers.js";
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
  const actor = h("input", {
    type: "text",
    value: params.actor ?? "",
    autocomplete: "off",
    spellcheck: false,
    placeholder: "key:3f2a9c01d2e4",
  });
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
  const query = {
    ...about,
    event: event || null,
    actor: actor || null,
    since: midnight(since),
    until: midnight(until, 1),
    limit: PAGE,
  };
  const place = h("div", { class: "stack audit" });
  const names = new Map(); // of keys, by their ids
  const more = async (cursor) => {
    const page = await call("GET", path, { query: { ...query, cursor }, signal });
    if (page.data.length === 0 && !cursor) return empty("docs", "No matching lines", "Change the filters.");
    if (!gallery && names.size === 0 && page.data.some((line) => line.actor.startsWith("key:")))
      for (const key of await all("/v1/keys", { query: { ended: true }, signal })) names.set(key.id, key.name);
    place.querySelector(":scope > .actions")?.remove();
    place.append(
      table(
        "Audit lines, newest first",
        ["When", "What", "By", "Details"],
        runs(page.data, event).map((lines) => row(lines, names)),
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

/** The lines in lists of one, but the moved thresholds of a gallery in one list: an enrollment moves them again and again. */
function runs(lines, event) {
  const found = [];
  for (const line of lines) {
    const folds = !event && line.event === "threshold_moved";
    const run = folds && found.find(([first]) => first.event === line.event && first.gallery === line.gallery);
    if (run) run.push(line);
    else found.push([line]);
  }
  return found;
}

const row = ([line, ...more], names) => [
  toTheSecond(line.at),
  h(
    "span",
    { title: `${line.event}: ${line.outcome}` },
    more.length > 0 ? `Threshold of “${line.gallery}” changed ${whole(1 + more.length)} times.` : sentence(line),
  ),
  h("span", { title: line.actor }, actor(line.actor, names)),
  more.length > 0
    ? h(
        "details",
        {},
        h("summary", {}, `since ${toTheSecond(more.at(-1).at)}`),
        h("pre", {}, [line, ...more].map(moved).join("\n")),
      )
    : particulars({ ...(line.subject && { subject: line.subject }), ...line.details }),
];

const moved = ({ at, details: { before, after, reason } }) =>
  `${toTheSecond(at)}: ${before?.threshold ?? "none"} → ${after?.threshold ?? "none"}${reason ? ` (${reason})` : ""}`;

const ACTORS = { operator: "Operator", anonymous: "Without a key", service: "Kith itself" };
const actor = (name, names) => ACTORS[name] ?? names.get(name.replace("key:", "")) ?? name.replace("key:", "Key ");

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
