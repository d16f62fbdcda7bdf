// What deserves a look in a gallery, what it means, and what can be done about it with one click.

import { call, galleryPath, subjectPath, templatePath } from "../api.js";
import { Aside } from "../aside.js";
import { fill, h, icon } from "../dom.js";
import { merge, move } from "../merging.js";
import { counted, oneIn, whole } from "../numbers.js";
import { galleryHeading } from "../reports.js";
import { button, confirmed, empty, linkButton, loading, problemBox, waiting } from "../ui.js";

const FIRST = 100;
const MORE = 1000; // as many as the service gives at once
const KINDS = {
  duplicate_subjects: [
    "Perhaps one person, enrolled twice",
    "Two names whose photos are so alike that hardly two people are. Whoever is enrolled twice is told apart from nobody: searches answer that it may be either.",
  ],
  mislabeled_template: [
    "Perhaps filed under the wrong person",
    "A photo unlike all others of the person it is filed under. Everybody who looks like it gets that person's name.",
  ],
  inconsistent_subject: [
    "Photos that disagree",
    "Photos of one person that do not look like one person, and nothing says which are right.",
  ],
  lookalikes: [
    "Lookalikes",
    "Two people, as far as can be told, who are alike enough to be taken for each other. A smaller risk or better photos of both help.",
  ],
};

export const title = ({ gallery }) => `Hygiene of ${gallery}`;

export function render({ gallery }, signal) {
  const body = h("div", { class: "stack wide" });
  const show = (limit) =>
    fill(
      body,
      loading(() => report(gallery, limit, signal, show), "Comparing everybody with everybody…"),
    );
  show(FIRST);
  return h(
    "div",
    { class: "page" },
    galleryHeading(
      gallery,
      "hygiene",
      "People enrolled twice, photos of somebody else, lookalikes. Look at the photos before you change anything.",
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
      "Nobody to compare yet",
      "As soon as two people are enrolled, everybody is compared with everybody here.",
      linkButton("Enroll somebody", `#/enroll?gallery=${encodeURIComponent(gallery)}`, { kind: "primary", icon: "enroll" }),
    );
  const aside = new Aside(gallery);
  if (found.next === null) aside.keepOf(found.findings);
  const open = found.findings.filter((finding) => !aside.has(finding));
  const kinds = Object.keys(KINDS).filter((kind) => open.some((finding) => finding.kind === kind));
  const hidden = found.findings.length - open.length;
  return [
    h(
      "div",
      { class: "row between" },
      h(
        "p",
        {},
        `${counted(settings.subjects, "person", "people")} and ${counted(settings.templates, "photo")} were compared: `,
        h("strong", {}, all === 0 ? "nothing looks wrong" : `${counted(all, "finding")}`),
        hidden > 0 ? `, ${whole(hidden)} of them set aside here.` : ".",
      ),
      h(
        "div",
        { class: "actions" },
        hidden > 0 && button("Show what was set aside", () => (aside.clear(), again(limit)), { kind: "quiet" }),
        button("Look again", () => again(limit)),
      ),
    ),
    open.length === 0 &&
      empty(
        "check",
        "Nothing to do",
        "Nobody seems to be enrolled twice, and every photo agrees with the others of its person. Look again after people were added.",
      ),
    open.length > 0 &&
      !settings.keep_crops &&
      h(
        "p",
        { class: "hint" },
        "This gallery keeps no faces to show. With “Keep a small picture of each enrolled face” in its ",
        h("a", { href: `#/galleries/${encodeURIComponent(gallery)}/settings` }, "settings"),
        ", it does from the next photo on.",
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
    found.next !== null &&
      h(
        "div",
        { class: "actions" },
        button(`Show more than the first ${whole(found.findings.length)}`, () => again(limit + MORE)),
      ),
  ];
}

/** The report with the first `limit` of its findings; `next` is null where these are all. */
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
          ? "It is right as it is"
          : "They are two people",
        () => {
          const before = [...place.childNodes];
          aside.add(finding);
          fill(
            place,
            finished("Set aside, on this computer alone: the service goes on reporting it.", () => {
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

function told({ kind, subjects, chance, similarity, own_similarity: own, belongs_to: belongs, templates }) {
  const rare =
    chance === null
      ? ""
      : `Of pairs of different people, ${chance < 1e-9 ? "fewer than 1 in 1,000,000,000" : oneIn(chance)} is so alike. `;
  const exact = [similarity !== null && `similarity ${similarity}`, own !== null && `to its own ${own}`]
    .filter(Boolean)
    .join(", ");
  const other =
    belongs === null ? null : called(subjects.find((one) => one.subject === belongs) ?? { subject: belongs });
  const text = {
    duplicate_subjects: rare,
    lookalikes: rare,
    mislabeled_template: other === null ? "It is like nobody else here either. " : `It looks like ${other}. ${rare}`,
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
          title: "File both under one name?",
          text: `All photos and tags of ${called(from)} are filed under ${called(to)}, with what else is known of them, and ${called(from)} is deleted. Where both say something of the same, what is said of ${called(to)} stays and the other goes, the name too. You can take it back as long as this page is open; ${called(from)} is then made anew, and counts as here since that moment.`,
          yes: `Keep ${called(to)}`,
          danger: false,
        });
        if (yes)
          await run(
            () => merge(gallery, from.subject, to.subject),
            `${called(from)} is now ${called(to)}. Undo makes ${called(from)} anew, here since that moment.`,
          );
      });
    return [h("span", {}, "One person:"), into(first, second), into(second, first)];
  }
  const remove = ({ template, subject }, label) =>
    button(
      label,
      async () => {
        const yes = await confirmed({
          title: "Delete this photo's template?",
          text: "It is erased, and cannot be brought back: only the same photo, enrolled again, can.",
          yes: "Delete it",
        });
        if (yes)
          await run(
            async () => void (await call("DELETE", templatePath(gallery, subject, template))),
            "It was deleted.",
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
          run(() => move(gallery, one.template, one.subject, belongs.subject), `It was moved to ${called(belongs)}.`),
        { icon: "move" },
      ),
    remove(one, finding.templates.length > 1 ? `Delete photo ${i + 1}` : "Delete the photo"),
  ]);
}

/** The kept faces of everybody in a finding; those in question are marked. The audit notes who looked. */
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
          ? h("p", { class: "hint" }, "No face was kept.")
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
