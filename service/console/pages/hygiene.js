// Findings of the hygiene check, with actions.

import { call, galleryPath, subjectPath, templatePath } from "../api.js";
import { Aside } from "../aside.js";
import { fill, h, icon } from "../dom.js";
import { merge, move } from "../merging.js";
import { counted, inHundred, ratio, whole } from "../numbers.js";
import { galleryHeading } from "../reports.js";
import { button, confirmed, empty, linkButton, loading, problemBox, waiting } from "../ui.js";

const FIRST = 100;
const MORE = 1000; // limit of the service
const KINDS = {
  duplicate_subjects: [
    "Possible duplicates",
    "Two people with very similar photos. If they are one person, searches cannot decide between the two names.",
  ],
  mislabeled_template: [
    "Possibly wrong person",
    "A photo unlike all other photos of its person. Similar faces get the wrong name.",
  ],
  inconsistent_subject: [
    "Inconsistent photos",
    "Photos of one person that do not look like one person. Kith cannot decide which are correct.",
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
  const all = Object.values(found.total).reduce((sum, count) => sum + count, 0);
  if (settings.subjects < 2)
    return empty(
      "hygiene",
      "Too few people",
      "The check compares all people of the gallery. Enroll at least two.",
      linkButton("Enroll a person", `#/enroll?gallery=${encodeURIComponent(gallery)}`, { kind: "primary", icon: "enroll" }),
    );
  const aside = new Aside(gallery);
  if (found.next === null) aside.keepOf([...found.findings, ...found.nearest]);
  const open = found.findings.filter((finding) => !aside.has(finding));
  const kinds = Object.keys(KINDS).filter((kind) => open.some((finding) => finding.kind === kind));
  const nearest = found.nearest.filter((finding) => !aside.has(finding));
  const hidden = found.findings.length - open.length + found.nearest.length - nearest.length;
  return [
    h(
      "div",
      { class: "row between" },
      h(
        "p",
        {},
        `${counted(settings.subjects, "person", "people")} and ${counted(settings.templates, "photo")} were compared: `,
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
    (open.length > 0 || nearest.length > 0) &&
      !settings.keep_crops &&
      h(
        "p",
        { class: "hint" },
        "This gallery stores no pictures. Turn on “Keep a small picture of each enrolled face” in the ",
        h("a", { href: `#/galleries/${encodeURIComponent(gallery)}/settings` }, "settings"),
        " to store them for new photos.",
      ),
    kinds.map((kind) =>
      section(
        gallery,
        kind,
        open.filter((finding) => finding.kind === kind),
        found.total[kind],
        settings,
        aside,
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
          h("p", { class: "lead" }, "The next similar people, probably different. Only a person can tell: compare their photos."),
        ),
        h(
          "ul",
          { class: "stack" },
          nearest.map((finding) => h("li", {}, card(gallery, finding, settings, aside))),
        ),
      ),
    found.next !== null &&
      h(
        "div",
        { class: "actions" },
        button(`Show more than the first ${whole(found.findings.length)}`, () => again(limit + MORE)),
      ),
  ];
}

/** The report with the first `limit` findings; `next` is null if these are all. */
async function reported(gallery, limit, signal) {
  const found = { findings: [], next: null };
  do {
    const query = { limit: Math.min(MORE, limit - found.findings.length), cursor: found.next };
    const { findings, ...rest } = await call("GET", `${galleryPath(gallery)}/hygiene`, { query, signal });
    Object.assign(found, rest).findings.push(...findings);
  } while (found.next !== null && found.findings.length < limit);
  return found;
}

function section(gallery, kind, findings, total, settings, aside) {
  const [name, meaning] = KINDS[kind];
  return h(
    "section",
    { class: "stack" },
    h("div", {}, h("h2", {}, name, " ", h("span", { class: "tag" }, whole(total))), h("p", { class: "lead" }, meaning)),
    h(
      "ul",
      { class: "stack" },
      findings.map((finding) => h("li", {}, card(gallery, finding, settings, aside))),
    ),
  );
}

// One finding

function card(gallery, finding, settings, aside) {
  const place = h("article", { class: "card finding", tabindex: "-1" });
  const photos = h("div", {});
  const acting = actions(gallery, finding, async (act, done) => {
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
    h(
      "div",
      { class: "row between" },
      h("h3", {}, headline(gallery, finding)),
      settings.keep_crops &&
        button("Show the faces", async () => fill(photos, await faces(gallery, finding)), {
          kind: "quiet",
          icon: "photo",
        }),
    ),
    h("p", {}, told(finding)),
    photos,
    h(
      "div",
      { class: "actions" },
      acting,
      button(
        finding.kind === "mislabeled_template" || finding.kind === "inconsistent_subject"
          ? "This is correct"
          : "They are two people",
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

function told({ kind, subjects, odds, similarity, own_similarity: own, belongs_to: belongs, templates }) {
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
    inconsistent_subject: `${counted(templates.length, "photo")} of this person do not agree. `,
  }[kind];
  return [text, exact && h("span", { class: "hint" }, `(${exact})`)];
}

function actions(gallery, finding, run) {
  const [first, second] = finding.subjects;
  if (finding.kind === "duplicate_subjects" || finding.kind === "lookalikes") {
    const into = (to, from) =>
      button(`Keep ${called(to)}`, async () => {
        const yes = await confirmed({
          title: "Merge both people?",
          text: `All photos, tags and fields of ${called(from)} move to ${called(to)}, and ${called(from)} is deleted. If both have a name or the same field, that of ${called(to)} stays. You can undo the merge while this page is open. Undo creates ${called(from)} again, with a new creation time.`,
          yes: `Keep ${called(to)}`,
          danger: false,
        });
        if (yes)
          await run(
            () => merge(gallery, from.subject, to.subject),
            `${called(from)} was merged into ${called(to)}. Undo creates ${called(from)} again, with a new creation time.`,
          );
      });
    return [h("span", {}, "One person:"), into(first, second), into(second, first)];
  }
  const remove = ({ template, subject }, label) =>
    button(
      label,
      async () => {
        const yes = await confirmed({
          title: "Delete this photo?",
          text: "This cannot be undone. To restore it, enroll the same photo again.",
          yes: "Delete it",
        });
        if (yes)
          await run(
            async () => void (await call("DELETE", templatePath(gallery, subject, template))),
            "Deleted.",
          );
      },
      { kind: "danger", icon: "trash" },
    );
  const belongs = finding.subjects.find((one) => one.subject === finding.belongs_to);
  return finding.templates.map((one, i) => [
    belongs &&
      button(
        `Move it to ${called(belongs)}`,
        () =>
          run(() => move(gallery, one.template, one.subject, belongs.subject), `Moved to ${called(belongs)}.`),
        { icon: "move" },
      ),
    remove(one, finding.templates.length > 1 ? `Delete photo ${i + 1}` : "Delete the photo"),
  ]);
}

/** The stored faces of a finding's people, with marks on the photos in question. The audit log records the access. */
async function faces(gallery, { subjects, templates }) {
  const held = await Promise.all(subjects.map(({ subject }) => call("GET", `${subjectPath(gallery, subject)}/export`)));
  const number = new Map(templates.map(({ template }, i) => [template, i + 1]));
  return h(
    "div",
    { class: "sides" },
    held.map((document, i) => {
      const kept = document.templates.filter((template) => template.crop);
      return h(
        "figure",
        {},
        h("figcaption", { class: "hint" }, called(subjects[i])),
        kept.length === 0
          ? h("p", { class: "hint" }, "No stored pictures.")
          : h(
              "div",
              { class: "faces" },
              kept.slice(0, 12).map(({ id, crop }) =>
                h(
                  "div",
                  { class: number.has(id) ? "face asked" : "face" },
                  h("img", {
                    src: `data:image/webp;base64,${crop.image}`,
                    width: 96,
                    height: 96,
                    alt: `${number.has(id) ? `Photo ${number.get(id)} in question` : "A photo"} of ${called(subjects[i])}`,
                  }),
                  number.has(id) &&
                    h("span", { class: "tag" }, templates.length > 1 ? `photo ${number.get(id)}` : "in question"),
                ),
              ),
            ),
      );
    }),
  );
}
