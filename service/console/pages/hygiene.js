// Findings of the hygiene check, with actions.

import { call, enrollPage, galleryPath, subjectPage, subjectPath, templatePath } from "../api.js";
import { Aside } from "../aside.js";
import { confirmed } from "../dialogs.js";
import { each, fill, h } from "../dom.js";
import { counted, inHundred, ratio, whole } from "../numbers.js";
import { galleryHeading } from "../reports.js";
import { Pictures, keepHint, sides } from "../stored.js";
import { button, empty, folded, linkButton, loading, notice, problemBox, waiting } from "../ui.js";
import { called } from "../words.js";

const LIMIT = 1000; // of the service
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
  const body = h("div.stack.wide");
  const show = () =>
    fill(
      body,
      loading(() => report(gallery, signal, show), "Comparing all people…"),
    );
  show();
  return h("div.page", [galleryHeading(gallery, "hygiene", "Compare the photos before you change anything."), body]);
}

async function report(gallery, signal, again) {
  const [settings, found] = await Promise.all([
    call("GET", galleryPath(gallery), { signal }),
    call("GET", `${galleryPath(gallery)}/hygiene`, { query: { limit: LIMIT }, signal }),
  ]);
  const { subject_count: subjects, template_count: templates, keep_crops: keeps } = settings;
  if (subjects < 2)
    return empty("hygiene", "Too few people", "The check compares all people of the gallery. Enroll at least two.", [
      linkButton("Enroll a person", enrollPage(gallery), { kind: "primary", icon: "enroll" }),
    ]);
  const all = Object.values(found.counts).reduce((sum, count) => sum + count, 0);
  const aside = new Aside(gallery);
  if (found.next === null) aside.keepOf([...found.data, ...found.nearest]);
  const open = found.data.filter((finding) => !aside.has(finding));
  const nearest = found.nearest.filter((finding) => !aside.has(finding));
  const hidden = found.data.length - open.length + found.nearest.length - nearest.length;
  const pictures = new Pictures(gallery, signal);
  const card = (finding) => h("li", new Finding(finding, { gallery, keeps, aside, pictures }).place);
  const anew = () => (aside.clear(), again());
  const recall = [found.expected_recall_low, found.expected_recall_high].map(inHundred).join(" to ");
  return [
    h("div.row.between", [
      h("p", [
        `${counted(subjects, "person", "people")} and ${counted(templates, "photo")} were compared: `,
        h("strong", all === 0 ? "no findings" : counted(all, "finding")),
        hidden > 0 ? `, ${whole(hidden)} dismissed.` : ".",
      ]),
      h("div.actions", [
        hidden > 0 && button("Show dismissed findings", anew, { kind: "quiet" }),
        button("Refresh", again),
      ]),
    ]),
    open.length === 0 &&
      empty("check", all === 0 ? "No findings" : "All findings are dismissed", "Compare the nearest pairs below."),
    found.expected_recall !== null &&
      h("p", [
        "This recognizer is expected to find ",
        h("strong", inHundred(found.expected_recall)),
        ` duplicates in this gallery (95 % interval: ${recall}).`,
      ]),
    (open.length > 0 || nearest.length > 0) && !keeps && keepHint(gallery),
    Object.entries(KINDS).map(([kind, [name, meaning]]) => {
      const findings = open.filter((finding) => finding.kind === kind);
      if (findings.length === 0) return null;
      const title = h("h2", [name, " ", h("span.tag", whole(found.counts[kind]))]);
      return h("section.stack", [h("div", [title, h("p.lead", meaning)]), each("ul.stack", findings, card)]);
    }),
    nearest.length > 0 &&
      h("section.stack", { "aria-label": "Nearest pairs" }, [
        h("div", [
          h("h2", "Nearest pairs"),
          h("p.lead", "The next similar people, probably different. Only a person can tell: compare their photos."),
        ]),
        each("ul.stack", nearest, card),
      ]),
    found.next !== null && h("p.hint", `These are the first ${whole(LIMIT)}. Decide some of them, then refresh.`),
  ];
}

/** A finding with its pictures and actions, in `place`. */
class Finding {
  constructor(finding, page) {
    Object.assign(this, page, finding);
    this.pair = this.kind !== "mislabeled_template"; // two people
    this.place = h("article.card.finding", { tabindex: "-1" });
    const dismiss = () => {
      const before = [...this.place.childNodes];
      const undo = () => {
        this.aside.remove(finding);
        fill(this.place, before);
      };
      this.aside.add(finding);
      this.finish("Dismissed on this computer. The service still reports it.", undo);
    };
    fill(this.place, [
      h("h3", this.headline()),
      h("p", this.told()),
      this.shown(),
      h("div.actions", [
        this.pair ? this.merges() : this.templates.map((one, i) => this.corrections(one, i)),
        button(this.pair ? "They are two people" : "This is correct", dismiss, { kind: "quiet" }),
      ]),
    ]);
  }

  finish(text, undo) {
    fill(this.place, notice("check", [h("p", text), undo && button("Undo", undo)]));
    this.place.focus();
  }

  /** Run `act`, and say that it is `done`. After an error the card is as before. */
  async run(act, done) {
    const before = [...this.place.children].filter((part) => !part.classList.contains("error"));
    fill(this.place, waiting("One moment…"));
    try {
      await act();
      this.finish(done);
    } catch (error) {
      fill(this.place, problemBox(error), before);
      this.place.focus();
    }
  }

  headline() {
    const link = (one) => h("a", { href: subjectPage(this.gallery, one.subject) }, called(one));
    const [first, second] = this.subjects.map(link);
    return this.pair ? [first, " and ", second] : first;
  }

  /** The name of one of the people, by id. */
  named = (subject) => called(this.subjects.find((one) => one.subject === subject) ?? { subject });

  told() {
    const { odds, similarity, own_similarity: own, belongs_to: belongs } = this;
    const other = belongs === null ? "It is not similar to any other person." : `It looks like ${this.named(belongs)}.`;
    const what = this.pair ? "both are one person" : "the photo shows another person";
    const text = [!this.pair && other, odds !== null && `Odds that ${what}: ${ratio(odds)}.`];
    const exact = [similarity !== null && `similarity ${similarity}`, own !== null && `to its person ${own}`];
    const hint = exact.filter(Boolean).join(", ");
    return [`${text.filter(Boolean).join(" ")} `, hint && h("span.hint", `(${hint})`)];
  }

  merges() {
    const into = (to, from) => {
      const [kept, gone] = [called(to), called(from)];
      const text = `All photos, tags and fields of ${gone} move to ${kept}, and ${gone} is deleted. If both have a name or the same field, that of ${kept} stays. This cannot be undone.`;
      return button(`Keep ${kept}`, async () => {
        const options = { shown: this.shown(), danger: false };
        if (!(await confirmed("Merge both people?", text, `Keep ${kept}`, options))) return;
        const act = () =>
          call("POST", `${subjectPath(this.gallery, from.subject)}/merge`, { json: { into: to.subject } });
        await this.run(act, `${gone} was merged into ${kept}.`);
      });
    };
    const [first, second] = this.subjects;
    const both = [into(first, second), into(second, first)];
    if (this.odds >= 1) return [h("span", "One person:"), both];
    return folded("They are one person", h("div.actions", both));
  }

  corrections({ template, subject }, i) {
    const { gallery, pictures } = this;
    const belongs = this.subjects.find((one) => one.subject === this.belongs_to);
    const moves = () => {
      const act = () => call("PATCH", templatePath(gallery, subject, template), { json: { subject: belongs.subject } });
      return this.run(act, `Moved to ${called(belongs)}.`);
    };
    const removes = async () => {
      const text = "This cannot be undone. To restore it, enroll the same photo again.";
      const shown =
        this.keeps && sides([["", pictures.of({ subject: subject, template: template }, `Photo ${i + 1}`)]]);
      if (!(await confirmed("Delete this photo?", text, "Delete it", { shown }))) return;
      await this.run(() => call("DELETE", templatePath(gallery, subject, template)), "Deleted.");
    };
    const label = this.templates.length > 1 ? `Delete photo ${i + 1}` : "Delete the photo";
    return [
      belongs && button(`Move it to ${called(belongs)}`, moves, { icon: "move" }),
      button(label, removes, { kind: "danger", icon: "trash" }),
    ];
  }

  /** The stored pictures side by side: of two people their most similar photos, otherwise the photos in question and the best
   * photos of the people that they are compared with. */
  shown() {
    if (!this.keeps) return null;
    const { pictures, templates, pair } = this;
    const photos = templates.slice(0, MAX_FACES).map(({ subject, template }, i) => {
      const caption = pair ? this.named(subject) : templates.length > 1 ? `photo ${i + 1}` : "in question";
      const alt = pair ? `A photo of ${caption}` : `Photo ${i + 1} in question`;
      return [caption, pictures.of({ subject: subject, template: template }, alt)];
    });
    const best = (one) => [called(one), pictures.of({ subject: one.subject }, `A photo of ${called(one)}`)];
    return sides([...photos, ...(pair ? [] : this.subjects.map(best))]);
  }
}
