import { call, enrollPage, galleryPage, galleryPath, newest, subjectPage } from "../api.js";
import { each, fill, h } from "../dom.js";
import { counted, when, whole } from "../numbers.js";
import { galleryHeading, watch } from "../reports.js";
import { Pictures } from "../stored.js";
import { strangers } from "../strangers.js";
import { afterTyping, button, empty, field, linkButton, loading, problemBox, stat, table, textInput } from "../ui.js";
import * as words from "../words.js";

export const title = ({ gallery }) => gallery;

const PAGE = 100;

export function render({ gallery, tag }, signal) {
  const enroll = enrollPage(gallery);
  return h("div.page", [
    galleryHeading(
      gallery,
      "",
      "The people in this gallery.",
      linkButton("Enroll", enroll, { kind: "primary", icon: "enroll" }),
      linkButton("Identify", `#/identify?gallery=${encodeURIComponent(gallery)}`, { icon: "search" }),
    ),
    loading(async () => {
      const found = await call("GET", galleryPath(gallery), { signal });
      const place = h("div", listed(gallery, found, tag, enroll, signal));
      const onNamed = async () => {
        const now = await call("GET", galleryPath(gallery), { signal });
        fill(place, listed(gallery, now, tag, enroll, signal));
      };
      return [renewed(found, signal), place, strangers(found, signal, onNamed)];
    }),
  ]);
}

const listed = (gallery, found, tag, enroll, signal) =>
  found.subject_count === 0 ? noPeople(enroll) : people(gallery, found, tag, signal);

const DRIFT = { ok: "as expected", watch: "slightly changed", drifted: "drifted" };

/** The figures of a gallery, which the page renews. */
function renewed(found, signal) {
  const place = fill(h("dl.stats.card"), figures(found));
  let first = true;
  watch(async () => {
    if (!first) fill(place, figures(await call("GET", galleryPath(found.name), { signal })));
    first = false;
    return false;
  }, signal);
  return place;
}

function figures(gallery) {
  return [
    stat("People", whole(gallery.subject_count)),
    stat("Photos", whole(gallery.template_count)),
    stat(
      "Accepts",
      gallery.risk.fpir ? `1 in ${words.many(1 / gallery.risk.fpir)}` : words.riskBriefly(gallery.risk),
      "wrong matches of strangers",
    ),
    DRIFT[gallery.drift?.state] && stat("Recent results", DRIFT[gallery.drift.state], "compared with the calibration"),
  ];
}

const noPeople = (enroll) =>
  empty(
    "people",
    "No people yet",
    "Enroll a person with two or three photos, or many people from a zip with one folder per person. Then identify photos.",
    linkButton("Enroll a person", enroll, { kind: "primary", icon: "enroll" }),
    linkButton("Enroll many people", "#/jobs", { icon: "jobs" }),
  );

/** The list of people in pages. The service searches all of them by name, id and tags. */
function people(gallery, { subject_count: subjects, keep_crops: keeps }, tag, signal) {
  const pictures = new Pictures(gallery, signal);
  const loaded = [];
  let next = null;
  let ready = false; // the first page was shown
  const search = h("input", { type: "search", autocomplete: "off" });
  const tagged = textInput({ value: tag ? words.typedTags([tag]) : "" });
  const list = h("div");
  const told = h("p.hint", { role: "status" });
  const rows = () => {
    const cells = loaded.map((one) =>
      row(gallery, one, keeps && one.template_count > 0 && pictures.once({ subject: one.id })),
    );
    const made = table("People", ["Name", "Id", "Tags", "Photos", "Since"], cells);
    made.classList.add("people");
    return made;
  };
  const turn = newest(signal);
  const more = button("Show more", () => turn(load).then(show));
  let asked = null; // the current query

  /** Load the next people. A page of a search may be empty although more people match. */
  async function load(until) {
    const before = loaded.length;
    const query = { limit: PAGE, tag: words.tags(tagged.value), q: search.value.trim() || null };
    do {
      const request = { query: { ...query, cursor: next }, signal: until };
      const page = await call("GET", `${galleryPath(gallery)}/subjects`, request);
      until.throwIfAborted();
      loaded.push(...page.data);
      next = page.next;
    } while (next && loaded.length === before);
  }

  function show() {
    const narrowed = search.value.trim() || tagged.value.trim();
    fill(list, loaded.length > 0 ? rows() : h("p.card", narrowed ? "No person matches." : "No people are enrolled."));
    const of = narrowed ? (next ? " so far" : "") : ` of ${whole(Math.max(subjects, loaded.length))}`;
    told.textContent = `${counted(loaded.length, "person", "people")}${of}.`;
    more.hidden = next === null;
  }

  async function restart() {
    // The first page is still awaited, and reads the fields; or nothing was changed.
    if (!ready || wanted() === asked) return;
    asked = wanted();
    loaded.length = 0;
    next = null;
    told.textContent = "Searching…";
    try {
      await turn(load);
      show();
    } catch (error) {
      if (error.name === "AbortError") return;
      fill(list, problemBox(error));
      told.textContent = "";
    }
  }
  search.addEventListener("input", afterTyping(restart, signal));
  tagged.addEventListener("change", restart);
  const wanted = () => JSON.stringify([search.value.trim(), tagged.value.trim()]);
  const first = loading(async () => {
    asked = wanted();
    await turn(load);
    ready = true;
    show();
    restart();
    return h("div.stack", [list, h("div.row", [told, more])]);
  });
  return h("section.stack", [
    h("div.choices", [
      field("Find", search, "A name or an id, or a part."),
      field("Tags", tagged, "People with all these tags. Separate tags with commas; quote tags that contain a comma."),
    ]),
    first,
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
