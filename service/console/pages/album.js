// One album: progress of its job, then groups of faces to merge, split and enroll.

import { all, call, galleryPage, galleryPath, part } from "../api.js";
import { askMerge, askWho } from "../asking.js";
import { careful, confirmed } from "../dialogs.js";
import { fill, h, icon } from "../dom.js";
import { counted, when, whole } from "../numbers.js";
import { receipt } from "../receipt.js";
import { pages, refusalList, watch } from "../reports.js";
import { Pictures } from "../stored.js";
import { button, empty, folded, heading, linkButton, notice, outcome, toast, waiting } from "../ui.js";
import { jobCard } from "./jobs.js";
import * as words from "../words.js";

const PAGE = 50;
const DOUBTFUL = 0.9; // certainty below which a face deserves a look

export const title = ({ gallery }) => `Album · ${gallery}`;

export function render({ gallery, album: id }, signal) {
  const path = `${galleryPath(gallery)}/albums/${part(id)}`;
  const facts = h("p.lead", "");
  const body = h("div.stack", waiting("Kith looks for faces. You can close this page…"));
  const progress = jobCard(id, () => look(), signal);
  const remove = async () => {
    done = true; // the page does not look at it meanwhile
    const gone = await call("DELETE", path).catch((error) => {
      done = false;
      look();
      throw error;
    });
    erase.remove();
    fill(facts);
    fill(body, receipt(gone.receipt, "The album is deleted."));
  };
  const question = () => ["Delete this album?", "Its faces are deleted. Enrolled people stay.", "Delete"];
  const erase = careful("Delete the album", question, remove, { icon: "trash", small: true });
  let done = false;
  const load = async () => {
    const [album, job] = await Promise.all([
      call("GET", path, { signal }),
      call("GET", `/v1/jobs/${part(id)}`, { signal }).catch(() => null),
    ]);
    if (done) return false;
    const has = `${counted(album.photo_count, "photo")}, ${counted(album.face_count, "face")}`;
    fill(facts, `${has}. The album is deleted ${when(album.expires_at)}.`);
    done = album.state !== "grouping";
    if (done) fill(body, new Groups(gallery, path, album, job, signal).element);
    else if (job) progress.update(job);
    if (!done && job && progress.parentElement === null) fill(body, h("ul.stack", progress));
    return !done;
  };
  const find = async () => {
    try {
      return !done && (await load());
    } catch (error) {
      if (done) return false;
      if (error.status !== 404) throw error;
      done = true;
      fill(body, gone(gallery));
      erase.remove();
      return false;
    }
  };
  const look = watch(find, signal, body);
  return h("div.page", [
    h("div.stack", [
      h("a.back", { href: galleryPage(gallery, "/albums") }, [icon("back"), `Albums of ${gallery}`]),
      heading("Album"),
      facts,
    ]),
    look.note,
    body,
    h("div.actions", erase),
  ]);
}

const gone = (gallery) =>
  empty("photo", "This album is gone", "It was deleted or has expired, or its job failed or was canceled.", [
    linkButton("Albums", galleryPage(gallery, "/albums")),
    linkButton("Jobs", `#/jobs?gallery=${encodeURIComponent(gallery)}`),
  ]);

const groupName = ({ id }) => `Group ${id.slice(1)}`;

class Groups {
  constructor(gallery, path, album, job, signal) {
    Object.assign(this, { gallery, path, signal, album: album.id, pictures: new Pictures(gallery, signal) });
    this.several = this.section(false, "No one is in several photos, or everyone is enrolled.");
    this.single = this.section(true, "All single faces were merged or enrolled.");
    const about =
      "They resemble no other face enough, or their quality is too low. Merge them into a group, or enroll them.";
    const begin = () => rest.open && this.single.start();
    const rest = folded("Single faces", [h("p.hint", about), this.single.element], { onToggle: begin });
    const see = h("a", { href: `#/jobs?gallery=${encodeURIComponent(gallery)}` }, "See the job");
    this.element = h("div.stack", [
      job?.failed_count > 0 &&
        notice("warning", h("p", [`${counted(job.failed_count, "photo")} could not be read. `, see, "."])),
      h("h2", "People"),
      h("p.hint", "Each group is probably one person. Look at the faces, then say who it is."),
      this.several.element,
      album.single_count > 0 && rest,
    ]);
    this.several.start();
  }

  /** A list of groups in pages, of one or of several faces. */
  section(single, nothing) {
    const list = h("ul.stack", { "aria-label": single ? "Single faces" : "Groups" });
    const ask = (cursor) =>
      call("GET", `${this.path}/groups`, { query: { single, limit: PAGE, cursor }, signal: this.signal });
    const shown = (data) => (list.append(...data.map((one) => this.card(one))), list);
    const start = () => list.children.length > 0 || fill(element, pages(ask, shown, h("p.card", nothing)));
    const element = h("div");
    return { element, start, list };
  }

  card(group) {
    const place = h("li.card.group", { dataset: { group: group.id } });
    this.show({ place, group, chosen: new Set() });
    return place;
  }

  /** Show a group again, after its data changed. */
  show(card) {
    const { place, group } = card;
    const focused = place.contains(document.activeElement);
    const named = groupName(group);
    const who = group.subject ? words.called(group) : named;
    const about = `${who}, ${counted(group.face_count, "face")}`;
    const act = (label, does, run, props) =>
      button(label, () => run.call(this, card), { ...props, "aria-label": `${does} ${named}`, small: true });
    const split = button("", () => this.split(card), { icon: "minus", small: true });
    const count = () => {
      split.hidden = card.chosen.size === 0 || card.chosen.size === group.face_count;
      split.querySelector("span").textContent = `Take ${counted(card.chosen.size, "face")} out`;
    };
    const face = (one, number) => {
      const box = h("input", {
        type: "checkbox",
        checked: card.chosen.has(one.id),
        "aria-label": `Face ${number + 1} of ${about}, in ${one.photo}`,
        onChange: () => (card.chosen[box.checked ? "add" : "delete"](one.id), count()),
      });
      const doubtful = one.certainty !== null && one.certainty < DOUBTFUL;
      const sure = one.reasons.length ? "low quality" : doubtful && "not sure";
      const picture = this.pictures.of({ album: this.album, face: one.id }, "");
      const below = group.face_count > 1 ? h("span.pick", [box, sure]) : h("span.hint", sure);
      return h("li", h("label.album-face", { title: one.photo }, [picture, below]));
    };
    count();
    const more = group.face_count > group.faces.length;
    fill(place, [
      h("div.row.between", [
        h("h3", { tabindex: "-1" }, who),
        h("span.row.tight", [
          h("span.hint", [counted(group.face_count, "face"), more && `, ${whole(group.faces.length)} shown`]),
          group.subject && outcome("identified", "check", named),
        ]),
      ]),
      h("ul.album-faces", { "aria-label": `Faces of ${about}` }, group.faces.map(face)),
      card.refused,
      h("div.actions", [
        act("Enroll", "Enroll", this.name, { icon: "enroll", kind: "primary" }),
        act("Merge", "Merge", this.merge, { icon: "move" }),
        more && act("Show all faces", "Show all faces of", this.showAll),
        split,
      ]),
    ]);
    if (focused) place.querySelector("h3").focus();
  }

  own = ({ group }) => `${this.path}/groups/${part(group.id)}`;

  update(card, group) {
    Object.assign(card, { group, chosen: new Set() });
    this.show(card);
  }

  leave(card) {
    const after = card.place.nextElementSibling ?? card.place.previousElementSibling;
    card.place.remove();
    after?.querySelector("h3")?.focus();
  }

  async showAll(card) {
    card.group.faces = await all(`${this.own(card)}/faces`, { query: { limit: 500 }, signal: this.signal });
    this.show(card);
  }

  name(card) {
    const { subject, name } = card.group;
    const options = { yes: "Enroll", known: subject && { id: subject, name } };
    const enroll = (found) => this.enroll(card, found);
    return askWho(this.gallery, this.signal, "Two groups may be one person.", enroll, options);
  }

  async merge(card) {
    const groups = await all(`${this.path}/groups`, { query: { limit: 500 }, signal: this.signal, most: 2000 });
    const others = groups.filter((one) => one.id !== card.group.id);
    const named = (one) => (one.subject ? `${words.called(one)} (group ${one.id.slice(1)})` : groupName(one));
    const told = (one) => `${named(one)}, ${counted(one.face_count, "face")}`;
    const picture = (one) => this.pictures.of({ album: this.album, face: one.id }, `Face in ${one.photo}`);
    const shown = ({ faces }) => h("div.album-faces", faces.slice(0, 4).map(picture));
    askMerge("group", others, told, shown, async (into) => {
      const group = await call("POST", `${this.own(card)}/merge`, { json: { into } });
      const target = this.element.querySelector(`[data-group="${group.id}"]`);
      const fresh = this.card(group);
      if (target) target.replaceWith(fresh);
      else this.several.list.append(fresh);
      if (target?.closest("details") && group.face_count > 1) this.several.list.append(fresh);
      this.leave(card);
      toast(`Merged into ${told(group)}.`);
    });
  }

  async split(card) {
    const faces = [...card.chosen];
    const made = await call("POST", `${this.own(card)}/split`, { json: { faces } });
    const { data } = await call("GET", `${this.own(card)}/faces`, { query: { limit: 8 }, signal: this.signal });
    const left = card.group.face_count - faces.length;
    this.update(card, { ...card.group, faces: data, face_count: left });
    card.place.after(this.card(made));
    toast(`${counted(faces.length, "face")} taken out, as group ${made.id.slice(1)}.`);
  }

  /** Enroll all faces as a person but those that a check refuses. `allowed`: overrides of the checks. */
  async enroll(card, person, allowed = {}) {
    const { group } = card;
    const json = { subject: person.id, ...(person.isNew && person.name && { name: person.name }), ...allowed };
    let enrolled = 0;
    let answer;
    do {
      answer = await call("POST", `${this.own(card)}/enroll`, { json });
      enrolled += answer.enrolled_count;
    } while (answer.enrolled_count > 0 && answer.remaining_count > answer.refused.length);
    const left = answer.remaining_count ? `, ${whole(answer.remaining_count)} not` : "";
    toast(`${counted(enrolled, "photo")} of ${words.called(person)} enrolled${left}.`);
    if (answer.remaining_count === 0) return this.leave(card);
    const photos = new Map(group.faces.map((one) => [one.id, one.photo]));
    card.refused =
      answer.refused.length > 0 &&
      folded(
        "Refused faces",
        [
          refusalList(answer.refused.map(({ face, problem }) => [photos.get(face) ?? "Face", problem])),
          button("Enroll them anyway", () => this.anyway(card, person), { kind: "danger" }),
        ],
        { open: true },
      );
    const { data } = await call("GET", `${this.own(card)}/faces`, { query: { limit: 8 }, signal: this.signal });
    const whose = enrolled > 0 && { subject: person.id, name: person.name };
    this.update(card, { ...group, ...whose, faces: data, face_count: answer.remaining_count });
  }

  /** Enroll faces that a check refused. */
  async anyway(card, person) {
    const text = "Only do this if they show this person: a photo of another person makes Kith confuse the two.";
    if (await confirmed("Enroll the refused faces?", text, "Enroll", { danger: false }))
      await this.enroll(card, person, { allow_duplicate: true, allow_inconsistent: true, allow_low_quality: true });
  }
}
