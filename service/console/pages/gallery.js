import { call, galleryPath } from "../api.js";
import { fill, h, icon } from "../dom.js";
import { counted, when, whole } from "../numbers.js";
import { galleryHeading } from "../reports.js";
import { button, empty, field, linkButton, loading, problemBox, stat, table } from "../ui.js";
import * as words from "../words.js";

export const title = ({ gallery }) => gallery;

const PAGE = 100;
const MOST = 1000; // that the service gives at once
const LISTED = 500; // rows that a browser draws in no time

export function render({ gallery, tag }, signal) {
  const enroll = `#/enroll?gallery=${encodeURIComponent(gallery)}`;
  return h(
    "div",
    { class: "page" },
    galleryHeading(
      gallery,
      "",
      "The people who are searched here, and how to add to them.",
      linkButton("Enroll", enroll, { kind: "primary", icon: "enroll" }),
      linkButton("Identify", `#/identify?gallery=${encodeURIComponent(gallery)}`, { icon: "search" }),
    ),
    loading(async () => {
      const found = await call("GET", galleryPath(gallery), { signal });
      return [figures(found), await heldNotice(found, signal), found.subjects === 0 ? nobody(enroll) : people(gallery, found, tag, signal)];
    }),
  );
}

/** Says that the gallery's retention waits for a confirmation, and how to give it. */
async function heldNotice({ name, retention_days: days }, signal) {
  if (days === null) return null;
  const due = await call("GET", `${galleryPath(name)}/retention`, { signal });
  if (!due.held) return null;
  const counts = `${whole(due.due_subjects)} of ${whole(due.subjects)} people and ${whole(due.due_templates)} of ${whole(due.templates)} photos`;
  return h(
    "section",
    { class: "notice error", role: "status" },
    icon("warning"),
    h(
      "div",
      {},
      h("h2", {}, "Retention waits for a confirmation"),
      h("p", {}, `${counts} are older than ${counted(days, "day", "days")}. So many are not erased at once: a wrong clock makes everybody look old. The server's clock says ${when(due.now)}.`),
      h("p", {}, "If that is right, erase them: ", h("code", {}, `kith gallery retention ${name} --erase`)),
    ),
  );
}

const BESIDE = "what searches find, beside the calibration";
const DRIFT = {
  ok: ["as expected", BESIDE],
  watch: ["worth watching", BESIDE],
  drifted: ["no longer as expected", BESIDE],
  too_few: ["too few", "searches to tell"],
};

function figures(gallery) {
  return h(
    "dl",
    { class: "stats card" },
    stat("People", whole(gallery.subjects)),
    stat("Photos", whole(gallery.templates)),
    stat("Accepts", gallery.risk.fpir ? `1 in ${words.many(1 / gallery.risk.fpir)}` : words.riskBriefly(gallery.risk), "strangers taken for somebody"),
    gallery.drift && stat("Lately", ...DRIFT[gallery.drift.state]),
  );
}

const nobody = (enroll) =>
  empty(
    "people",
    "Nobody is enrolled yet",
    "Enroll a person with two or three photos, or many people at once from a zip with a folder for each. Then ask who is in a photo.",
    linkButton("Enroll the first", enroll, { kind: "primary", icon: "enroll" }),
    linkButton("Many at once", "#/jobs", { icon: "jobs" }),
  );

/** The people, a page at a time; found by name or id among those shown, by tag among all. */
function people(gallery, { subjects }, tag, signal) {
  const loaded = [];
  let next = null;
  let listed = LISTED;
  let hits = 0;
  const search = h("input", { type: "search", autocomplete: "off" });
  const tagged = h("input", { type: "text", value: tag ? words.typedTags([tag]) : "", autocomplete: "off" });
  const list = h("div", {});
  const told = h("p", { class: "hint", role: "status" });
  const rows = (shown) => {
    const made = table("People", ["Name", "Id", "Tags", "Photos", "Since"], shown.map((one) => row(gallery, one)));
    made.classList.add("people");
    return made;
  };
  const more = button("Show more", async () => {
    if (hits > listed) {
      listed += LISTED;
      return show();
    }
    await load(PAGE);
    listed = Math.max(listed, hits + PAGE); // of those found, what was just read is listed, too
    show();
  });
  const every = button("Load all, to search them", async () => {
    const mine = reading;
    while (next && mine === reading && !signal.aborted) {
      await load(MOST);
      told.textContent = `${counted(loaded.length, "person", "people")} so far…`;
    }
    show();
  }, { kind: "quiet" });

  let reading = 0; // which of the tags asked for, one after another, is on its way

  async function load(limit) {
    const [mine, cursor] = [reading, next];
    const wanted = words.tags(tagged.value);
    const page = await call("GET", `${galleryPath(gallery)}/subjects`, { query: { limit, cursor, tag: wanted }, signal });
    if (mine !== reading || cursor !== next) return; // other tags were asked for since, or this page is there already
    loaded.push(...page.subjects);
    next = page.next;
  }

  function show() {
    const text = search.value.trim().toLowerCase();
    const shown = text ? loaded.filter((one) => `${one.name ?? ""} ${one.id}`.toLowerCase().includes(text)) : loaded;
    const narrowed = text || tagged.value.trim();
    hits = shown.length;
    fill(
      list,
      hits > 0
        ? rows(shown.slice(0, listed))
        : h("p", { class: "card" }, narrowed ? "Nobody here fits that." : "Nobody is enrolled."),
    );
    const of = narrowed ? "" : ` of ${whole(Math.max(subjects, loaded.length))}`;
    told.textContent = `${counted(shown.length, "person", "people")}${of}${text && next ? ` among the first ${whole(loaded.length)}` : ""}${hits > listed ? `, of whom ${whole(listed)} are listed` : ""}.`;
    more.hidden = next === null && hits <= listed;
    every.hidden = next === null;
  }

  async function restart() {
    const mine = ++reading;
    loaded.length = 0;
    next = null;
    listed = LISTED;
    try {
      await load(PAGE);
      if (mine === reading) show();
    } catch (error) {
      if (mine === reading && error.name !== "AbortError") fill(list, problemBox(error));
    }
  }
  search.addEventListener("input", show);
  tagged.addEventListener("change", restart);
  const first = loading(async () => (await load(PAGE), show(), h("div", { class: "stack" }, list, h("div", { class: "row" }, told, more, every))));
  return h("section", { class: "stack" }, h("div", { class: "choices" }, field("Find", search, "A name or an id."), field("With the tags", tagged, "Those who have all of them; commas between. One with a comma stands in quotes.")), first);
}

function row(gallery, one) {
  const at = `#/galleries/${encodeURIComponent(gallery)}`;
  return [
    h("a", { href: `${at}/subjects/${encodeURIComponent(one.id)}`, title: one.name || one.id }, one.name || one.id),
    h("code", { title: one.id }, one.id),
    h("span", { class: "row tight" }, one.tags.map((tag) => h("a", { class: "tag", href: `${at}?tag=${encodeURIComponent(tag)}` }, tag))),
    whole(one.templates),
    when(one.created_at),
  ];
}
