import { call, enrollPage, galleryPage, galleryPath, subjectPage } from "../api.js";
import { each, fill, h } from "../dom.js";
import { counted, many, when, whole } from "../numbers.js";
import { galleryHeading, pages, watch } from "../reports.js";
import { Pictures } from "../stored.js";
import { strangers } from "../strangers.js";
import { afterTyping, field, textInput } from "../forms.js";
import { empty, linkButton, stat, table, waiting } from "../ui.js";
import * as words from "../words.js";

export const title = ({ gallery }) => gallery;

const PAGE = 100;

export function render({ gallery, tag }, signal) {
  const enroll = enrollPage(gallery);
  const [stats, list, body] = [h("dl.stats.card"), h("div"), h("div.stack.wide", waiting())];
  const onNamed = () => (fill(list), look());
  const look = watch(
    async () => {
      const found = await call("GET", galleryPath(gallery), { signal });
      fill(stats, figures(found));
      if (!list.hasChildNodes())
        fill(list, found.subject_count === 0 ? noPeople(enroll) : people(gallery, found, tag, signal));
      if (!body.contains(stats)) fill(body, stats, list, strangers(found, signal, onNamed));
    },
    signal,
    body,
  );
  return h("div.page", [
    galleryHeading(gallery, "", "The people in this gallery.", [
      linkButton("Enroll", enroll, { kind: "primary", icon: "enroll" }),
      linkButton("Identify", `#/identify?gallery=${encodeURIComponent(gallery)}`, { icon: "search" }),
    ]),
    look.note,
    body,
  ]);
}

const DRIFT = { ok: "as expected", watch: "slightly changed", drifted: "drifted" };

function figures(gallery) {
  return [
    stat("People", whole(gallery.subject_count)),
    stat("Photos", whole(gallery.template_count)),
    stat(
      "Accepts",
      gallery.risk.fpir ? `1 in ${many(1 / gallery.risk.fpir)}` : words.riskInWords(gallery.risk),
      "wrong matches of strangers",
    ),
    DRIFT[gallery.drift?.state] && stat("Recent results", DRIFT[gallery.drift.state], "compared with the calibration"),
  ];
}

const noPeople = (enroll) =>
  empty("people", "No people yet", "Enroll a person with two or three photos, or many people from an archive.", [
    linkButton("Enroll a person", enroll, { kind: "primary", icon: "enroll" }),
    linkButton("Enroll many people", "#/jobs", { icon: "jobs" }),
  ]);

/** The list of people in pages. The service searches all of them by name, id and tags. */
function people(gallery, { subject_count: subjects, keep_crops: keeps }, tag, signal) {
  const pictures = new Pictures(gallery, signal);
  const search = h("input", { type: "search", autocomplete: "off" });
  const tagged = textInput({ value: tag ? words.typedTags([tag]) : "" });
  const list = h("div.stack.people");
  const cells = (one) => row(gallery, one, keeps && one.template_count > 0 && pictures.once({ subject: one.id }));
  const rows = (data) => table("People", ["Name", "Id", "Tags", "Photos", "Since"], data.map(cells));
  let asked = null; // the current query

  function show() {
    const query = { limit: PAGE, tag: words.tags(tagged.value), q: search.value.trim() || null };
    if (JSON.stringify(query) === asked) return;
    asked = JSON.stringify(query);
    const told = h("p.hint", { role: "status" });
    const narrowed = query.q || query.tag.length > 0;
    let count = 0;
    const ask = async (cursor) => {
      let page = { next: cursor };
      do
        page = await call("GET", `${galleryPath(gallery)}/subjects`, {
          query: { ...query, cursor: page.next },
          signal,
        });
      while (page.next && page.data.length === 0); // more people can match
      count += page.data.length;
      const of = narrowed ? (page.next ? " so far" : "") : ` of ${whole(Math.max(subjects, count))}`;
      told.textContent = `${counted(count, "person", "people")}${of}.`;
      return page;
    };
    fill(list, pages(ask, rows, h("p.card", narrowed ? "No person matches." : "No people are enrolled.")), told);
  }
  search.addEventListener("input", afterTyping(show, signal));
  tagged.addEventListener("change", show);
  show();
  return h("section.stack", [
    h("div.choices", [
      field("Find", search, "A name or an id, or a part."),
      field("Tags", tagged, "People with all these tags. Separate tags with commas; quote tags that contain a comma."),
    ]),
    list,
  ]);
}

function row(gallery, one, face) {
  const at = galleryPage(gallery);
  return [
    h("span.person-cell", [
      face,
      h("a", { href: subjectPage(gallery, one.id), title: one.name || one.id }, one.name || one.id),
    ]),
    h("code", { title: one.id }, one.id),
    each("span.row.tight", one.tags, (tag) => h("a.tag", { href: `${at}?tag=${encodeURIComponent(tag)}` }, tag)),
    whole(one.template_count),
    when(one.created_at),
  ];
}
