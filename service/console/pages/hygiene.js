// Findings of the hygiene check, with actions.

import { call, galleryPath, templatePath } from "../api.js";
import { Aside } from "../aside.js";
import { fill, h, icon } from "../dom.js";
import { merge, move } from "../merging.js";
import { counted, inHundred, ratio, whole } from "../numbers.js";
import { galleryHeading } from "../reports.js";
import { Pictures, keepHint, sides } from "../stored.js";
import { button, confirmed, empty, linkButton, loading, problemBox, waiting } from "../ui.js";

const FIRST = 100;
const MORE = 1000; // limit of the service
const MAX_FACES = 12;
const KINDS = {
  duplicate_subjects: [
    "Possible duplicates",
    "Two people with very similar photos. If they are one person, searches cannot decide between the two names.",
  ],
  mislabeled_template: [
    "Possibly wrong person",
    "A photo unlike all other photos of its person. Similar faces get the wrong name.",
  ],
  lookalikes: [
    "Lookalikes",
    "Two different people who are similar enough to be confused. Use a smaller risk, or better photos of both.",
  ],
};

export const title = ({ gallery }) => `Hygiene of ${gallery}`;

export function render({ gallery }, signal) {
  const body = h("div", { class: "stack wide" });
  const show = (limit) =>
    fill(
      body,
      loading(() => report(gallery, limit, signal, show), "Comparing all people…"),
    );
  show(FIRST);
  return h(
    "div",
    { class: "page" },
    galleryHeading(
      gallery,
      "hygiene",
      "Duplicates, mislabeled photos and lookalikes. Look at the photos before you change anything.",
    ),
    body,
  );
}

async function report(gallery, limit, signal, again) {
  const [settings, found] = await Promise.all([
    call("GET", galleryPath(gallery), { signal }),
    reported(gallery, limit, signal),
  ]);
  const all = Object.values(found.counts).reduce((sum, count) => sum + count, 0);
  if (settings.subject_count < 2)
    return empty(
      "hygiene",
      "Too few people",
      "The check compares all people of the gallery. Enroll at least two.",
      linkButton("Enroll a person", `#/enroll?gallery=${encodeURIComponent(gallery)}`, {
        kind: "primary",
        icon: "enroll",
      }),
    );
  const aside = new Aside(gallery);
  const pictures = new Pictures(gallery, signal);
  if (found.next === null) aside.keepOf([...found.data, ...found.nearest]);
  const open = found.data.filter((finding) => !aside.has(finding));
  const kinds = Object.keys(KINDS).filter((kind) => open.some((finding) => finding.kind === kind));
  const nearest = found.nearest.filter((finding) => !aside.has(finding));
  const hidden = found.data.length - open.length + found.nearest.length - nearest.length;
  return [
    h(
      "div",
      { class: "row between" },
      h(
        "p",
        {},
        `${counted(settings.subject_count, "person", "people")} and ${counted(settings.template_count, "photo")} were compared: `,
        h("strong", {}, all === 0 ? "no findings" : `${counted(all, "finding")}`),
        hidden > 0 ? `, ${whole(hidden)} dismissed.` : ".",
      ),
      h(
        "div",
        { class: "actions" },
        hidden > 0 && button("Show dismissed findings", () => (aside.clear(), again(limit)), { kind: "quiet" }),
        button("Refresh", () => again(limit)),
      ),
    ),
    open.length === 0 &&
      empty(
        "check",
        all === 0 ? "No findings" : "All findings are dismissed",
        "Compare the nearest pairs below: the recognizer does not find every duplicate. Check again after new enrollments.",
      ),
    found.expected_recall !== null &&
      h(
        "p",
        {},
        "This recognizer is expected to find ",
        h("strong", {}, inHundred(found.expected_recall)),
        ` duplicates in this gallery (95 % interval: ${inHundred(found.expected_recall_low)} to ${inHundred(found.expected_recall_high)}).`,
      ),
    (open.length > 0 || nearest.length > 0) && !settings.keep_crops && keepHint(gallery),
    kinds.map((kind) =>
      section(
        gallery,
        kind,
        open.filter((finding) => finding.kind === kind),
        found.counts[kind],
        settings,
        aside,
        pictures,
      ),
    ),
    nearest.length > 0 &&
      h(
        "section",
        { class: "stack", "aria-label": "Nearest pairs" },
        h(
          "div",
          {},
          h("h2", {}, "Nearest pairs"),
          h(
            "p",
            { class: "lead" },
            "The next similar people, probably different. Only a person can tell: compare their photos.",
          ),
        ),
        h(
          "ul",
          { class: "stack" },
          nearest.map((finding) => h("li", {}, card(gallery, finding, settings, aside, pictures))),
        ),
      ),
    found.next !== null &&
      h(
        "div",
        { class: "actions" },
        button(`Show more than the first ${whole(found.data.length)}`, () => again(limit + MORE)),
      ),
  ];
}

/** The report with the first `limit` findings; `next` is null if these are all. */
async function reported(gallery, limit, signal) {
  const found = { data: [], next: null };
  do {
    const query = { limit: Math.min(MORE, limit - found.data.length), cursor: found.next };
    const { data, ...rest } = await call("GET", `${galleryPath(gallery)}/hygiene`, { query, signal });
    Object.assign(found, rest).data.push(...data);
  } while (found.next !== null && found.data.length < limit);
  return found;
}

function section(gallery, kind, findings, total, settings, aside, pictures) {
  const [name, meaning] = KINDS[kind];
  return h(
    "section",
    { class: "stack" },
    h("div", {}, h("h2", {}, name, " ", h("span", { class: "tag" }, whole(total))), h("p", { class: "lead" }, meaning)),
    h(
      "ul",
      { class: "stack" },
      findings.map((finding) => h("li", {}, card(gallery, finding, settings, aside, pictures))),
    ),
  );
}

// One finding

function card(gallery, finding, settings, aside, pictures) {
  const place = h("article", { class: "card finding", tabindex: "-1" });
  const shown = () => settings.keep_crops && faces(pictures, finding);
  const acting = actions(gallery, finding, pictures, shown, async (act, done) => {
    const before = [...place.children].filter((part) => !part.classList.contains("error"));
    fill(place, waiting("One moment…"));
    try {
      const back = await act();
      fill(
        place,
        finished(
          done,
          back &&
            (async () => {
              await back();
              fill(place, before);
              place.focus();
            }),
        ),
      );
    } catch (error) {
      fill(place, problemBox(error), before);
    }
    place.focus();
  });
  return fill(
    place,
    h("h3", {}, headline(gallery, finding)),
    h("p", {}, told(finding)),
    shown(),
    h(
      "div",
      { class: "actions" },
      acting,
      button(
        finding.kind === "mislabeled_template" ? "This is correct" : "They are two people",
        () => {
          const before = [...place.childNodes];
          aside.add(finding);
          fill(
            place,
            finished("Dismissed on this computer. The service still reports it.", () => {
              aside.remove(finding);
              fill(place, before);
            }),
          );
          place.focus();
        },
        { kind: "quiet" },
      ),
    ),
  );
}

const finished = (text, undo) =>
  h("div", { class: "notice" }, icon("check"), h("div", {}, h("p", {}, text), undo && button("Undo", undo)));

const called = ({ subject, name }) => name || subject;

function headline(gallery, { subjects, kind }) {
  const shown = kind === "mislabeled_template" ? subjects.slice(0, 1) : subjects;
  return shown.map((one, i) => [
    i > 0 && " and ",
    h(
      "a",
      { href: `#/galleries/${encodeURIComponent(gallery)}/subjects/${encodeURIComponent(one.subject)}` },
      called(one),
    ),
  ]);
}

function told({ kind, subjects, odds, similarity, own_similarity: own, belongs_to: belongs }) {
  const one = odds === null ? "" : `Odds that both are one person: ${ratio(odds)}. `;
  const wrong = odds === null ? "" : `Odds that the photo shows another person: ${ratio(odds)}. `;
  const exact = [similarity !== null && `similarity ${similarity}`, own !== null && `to its person ${own}`]
    .filter(Boolean)
    .join(", ");
  const other =
    belongs === null ? null : called(subjects.find((one) => one.subject === belongs) ?? { subject: belongs });
  const text = {
    duplicate_subjects: one,
    lookalikes: one,
    mislabeled_template: `${other === null ? "It is not similar to any other person. " : `It looks like ${other}. `}${wrong}`,
  }[kind];
  return [text, exact && h("span", { class: "hint" }, `(${exact})`)];
}

function actions(gallery, finding, pictures, shown, run) {
  const [first, second] = finding.subjects;
  if (finding.kind === "duplicate_subjects" || finding.kind === "lookalikes") {
    const into = (to, from) =>
      button(`Keep ${called(to)}`, async () => {
        const yes = await confirmed({
          title: "Merge both people?",
          text: `All photos, tags and fields of ${called(from)} move to ${called(to)}, and ${called(from)} is deleted. If both have a name or the same field, that of ${called(to)} stays. You can undo the merge while this page is open. Undo creates ${called(from)} again, with a new creation time.`,
          shown: shown(),
          yes: `Keep ${called(to)}`,
          danger: false,
        });
        if (yes)
          await run(
            () => merge(gallery, from.subject, to.subject),
            `${called(from)} was merged into ${called(to)}. Undo creates ${called(from)} again, with a new creation time.`,
          );
      });
    const merges = [into(first, second), into(second, first)];
    if (finding.odds >= 1) return [h("span", {}, "One person:"), merges];
    return h(
      "details",
      { class: "details" },
      h("summary", {}, "They are one person"),
      h("div", { class: "actions" }, merges),
    );
  }
  const remove = ({ template, subject }, label, alt) =>
    button(
      label,
      async () => {
        const yes = await confirmed({
          title: "Delete this photo?",
          text: "This cannot be undone. To restore it, enroll the same photo again.",
          shown: shown() && sides([["", pictures.photo(subject, template, alt)]]),
          yes: "Delete it",
        });
        if (yes)
          await run(async () => void (await call("DELETE", templatePath(gallery, subject, template))), "Deleted.");
      },
      { kind: "danger", icon: "trash" },
    );
  const belongs = finding.subjects.find((one) => one.subject === finding.belongs_to);
  return finding.templates.map((one, i) => [
    belongs &&
      button(
        `Move it to ${called(belongs)}`,
        () => run(() => move(gallery, one.template, one.subject, belongs.subject), `Moved to ${called(belongs)}.`),
        { icon: "move" },
      ),
    remove(one, finding.templates.length > 1 ? `Delete photo ${i + 1}` : "Delete the photo", `Photo ${i + 1}`),
  ]);
}

/** The stored pictures of a finding, side by side: for two people their most similar photos, otherwise the photos in question
 * and the best photos of the people that they are compared with. */
function faces(pictures, { kind, subjects, templates }) {
  const pair = kind === "duplicate_subjects" || kind === "lookalikes";
  const one = (subject) => called(subjects.find((other) => other.subject === subject) ?? { subject });
  const photos = templates.slice(0, MAX_FACES).map(({ subject, template }, i) => {
    const caption = pair ? one(subject) : templates.length > 1 ? `photo ${i + 1}` : "in question";
    const alt = pair ? `A photo of ${one(subject)}` : `Photo ${i + 1} in question`;
    return [caption, pictures.photo(subject, template, alt)];
  });
  const best = pair ? [] : subjects;
  return sides([
    ...photos,
    ...best.map((other) => [called(other), pictures.person(other.subject, `A photo of ${called(other)}`)]),
  ]);
}
