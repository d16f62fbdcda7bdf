// One album: progress of its job, then groups of faces to merge, split and enroll.

import { all, call, galleryPath, part } from "../api.js";
import { ask, askWho } from "../asking.js";
import { fill, h, icon } from "../dom.js";
import { counted, when, whole } from "../numbers.js";
import { receipt } from "../receipt.js";
import { refusalList, watch } from "../reports.js";
import { Pictures } from "../stored.js";
import { button, confirmed, empty, field, heading, linkButton, loading, problemBox, toast, waiting } from "../ui.js";
import * as words from "../words.js";

const PAGE = 50;
const MAX_SPLIT = 1000; // limit of the service
const DOUBTFUL = 0.9; // certainty below which a face deserves a look

export const title = ({ gallery }) => `Album · ${gallery}`;

export function render({ gallery, album: id }, signal) {
  const path = `${galleryPath(gallery)}/albums/${part(id)}`;
  const facts = h("p", { class: "lead" }, "");
  const body = h("div", { class: "stack" }, waiting("Loading the album…"));
  const erase = button(
    "Delete the album",
    async () => {
      const sure = await confirmed({
        title: "Delete this album?",
        text: "Its faces are deleted. Enrolled people stay.",
        yes: "Delete",
      });
      if (!sure) return;
      done = true; // the page does not look at it meanwhile
      const gone = await call("DELETE", path).catch((error) => {
        done = false;
        look();
        throw error;
      });
      erase.remove();
      fill(facts);
      fill(body, receipt(gone.receipt, "The album is deleted."));
    },
    { kind: "danger", icon: "trash" },
  );
  let done = false;
  const look = watch(async () => {
    if (done) return false;
    try {
      const [album, job] = await Promise.all([
        call("GET", path, { signal }),
        call("GET", `/v1/jobs/${part(id)}`, { signal }).catch(() => null),
      ]);
      if (done) return false;
      fill(
        facts,
        `${counted(album.photo_count, "photo")}, ${counted(album.face_count, "face")}. The album is deleted ${when(album.expires_at)}.`,
      );
      if (album.state === "grouping") {
        progress(body, job);
        return true;
      }
      done = true;
      fill(body, new Groups(gallery, path, album, job, signal).element);
    } catch (error) {
      if (error.name === "AbortError") throw error;
      if (done) return false;
      done = error.status === 404;
      fill(body, error.status === 404 ? gone(gallery) : problemBox(error, () => look()));
      if (!done) throw error;
    }
    return false;
  }, signal);
  return h(
    "div",
    { class: "page" },
    h(
      "div",
      { class: "stack" },
      h(
        "a",
        { class: "back", href: `#/galleries/${encodeURIComponent(gallery)}/albums` },
        icon("back"),
        `Albums of ${gallery}`,
      ),
      heading("Album", "", erase),
      facts,
    ),
    look.note,
    body,
  );
}

const gone = (gallery) =>
  empty(
    "photo",
    "This album is gone",
    "It was deleted or has expired, or its job failed or was canceled.",
    linkButton("Albums", `#/galleries/${encodeURIComponent(gallery)}/albums`),
    linkButton("Jobs", `#/jobs?gallery=${encodeURIComponent(gallery)}`),
  );

/** Show how far the job is; the elements stay, so that screen readers are not interrupted. */
function progress(body, job) {
  let bar = body.querySelector("progress");
  if (!bar) {
    bar = h("progress", { max: 1, "aria-label": "Progress" });
    fill(
      body,
      h(
        "section",
        { class: "card" },
        h("h2", {}, "Looking for faces"),
        bar,
        h("p", { class: "far" }),
        h("p", { class: "hint" }, "You can close this page. The job goes on."),
      ),
    );
  }
  if (job?.total_count) bar.value = job.done_count / job.total_count;
  body.querySelector(".far").textContent = job?.total_count
    ? `${whole(job.done_count)} of ${counted(job.total_count, "photo")}`
    : "Waits for a free worker.";
}

class Groups {
  constructor(gallery, path, album, job, signal) {
    Object.assign(this, { gallery, path, signal, album: album.id, pictures: new Pictures(gallery, signal) });
    this.told = h("p", { class: "unseen", role: "status" });
    this.several = this.section(false, "Nobody is in several photos, or everybody is enrolled.");
    const singles = h("summary", {}, "Single faces");
    this.single = this.section(true, "All single faces were merged or enrolled.");
    const rest = h(
      "details",
      { class: "details", onToggle: () => rest.open && this.single.start() },
      singles,
      h(
        "p",
        { class: "hint" },
        "They resemble no other face enough, or their quality is too low. Merge them into a group, or enroll them.",
      ),
      this.single.element,
    );
    this.element = h(
      "div",
      { class: "stack" },
      this.told,
      job?.failed_count > 0 &&
        h(
          "p",
          { class: "notice" },
          icon("warning"),
          h(
            "span",
            {},
            `${counted(job.failed_count, "photo")} could not be read. `,
            h("a", { href: `#/jobs?gallery=${encodeURIComponent(gallery)}` }, "See the job"),
            ".",
          ),
        ),
      h("h2", {}, "People"),
      h("p", { class: "hint" }, "Each group is probably one person. Look at the faces, then say who it is."),
      this.several.element,
      album.single_count > 0 && rest,
    );
    this.several.start();
  }

  /** A list of groups in pages, of one or of several faces. */
  section(single, nothing) {
    const list = h("ul", { class: "stack", "aria-label": single ? "Single faces" : "Groups" });
    const place = h("div", { class: "stack" });
    let next = null;
    const load = async () => {
      const page = await call("GET", `${this.path}/groups`, {
        query: { single, limit: PAGE, cursor: next },
        signal: this.signal,
      });
      list.append(...page.data.map((one) => this.card(one)));
      next = page.next;
      fill(place, list.children.length ? list : h("p", { class: "card" }, nothing), next && button("Show more", load));
    };
    const start = () => {
      if (place.parentElement === null || list.children.length === 0)
        fill(
          element,
          loading(async () => (await load(), place)),
        );
    };
    const element = h("div", {});
    return { element, start, list };
  }

  say(text) {
    this.told.textContent = text;
    toast(text);
  }

  card(group) {
    const place = h("li", { class: "card group", dataset: { group: group.id } });
    const card = { place, group, chosen: new Set(), every: false };
    this.show(card);
    return place;
  }

  /** Show a group again, after its data changed. `focus`: whether the focused button was in it. */
  show(card) {
    const { place, group } = card;
    const focused = place.contains(document.activeElement);
    const who = group.subject ? words.called({ id: group.subject, name: group.name }) : `Group ${group.id.slice(1)}`;
    const about = `${who}, ${counted(group.face_count, "face")}`;
    const named = `Group ${group.id.slice(1)}`;
    const split = button("", () => this.split(card), { icon: "minus" });
    const small = (element) => (element.classList.add("small"), element);
    const count = () => {
      split.hidden = card.chosen.size === 0 || card.chosen.size === group.face_count;
      split.querySelector("span").textContent = `Take ${counted(card.chosen.size, "face")} out`;
    };
    const face = (one, number) => {
      const box = h("input", {
        type: "checkbox",
        checked: card.chosen.has(one.id),
        "aria-label": `Face ${number + 1} of ${about}, in ${one.photo}`,
      });
      box.addEventListener(
        "change",
        () => (box.checked ? card.chosen.add(one.id) : card.chosen.delete(one.id), count()),
      );
      const sure = one.reasons.length
        ? "low quality"
        : one.certainty !== null && one.certainty < DOUBTFUL
          ? "not sure"
          : "";
      return h(
        "li",
        {},
        h(
          "label",
          { class: "album-face", title: one.photo },
          this.pictures.albumFace(this.album, one.id, ""),
          group.face_count > 1 && h("span", { class: "pick" }, box, sure),
          group.face_count === 1 && h("span", { class: "hint" }, sure),
        ),
      );
    };
    count();
    fill(
      place,
      h(
        "div",
        { class: "row between" },
        h("h3", { tabindex: "-1" }, who),
        h(
          "span",
          { class: "row tight" },
          h(
            "span",
            { class: "hint" },
            counted(group.face_count, "face"),
            group.face_count > group.faces.length && `, ${whole(group.faces.length)} shown`,
          ),
          group.subject && h("span", { class: "outcome identified" }, icon("check"), named),
        ),
      ),
      h("ul", { class: "album-faces", "aria-label": `Faces of ${about}` }, group.faces.map(face)),
      card.refused,
      h(
        "div",
        { class: "actions" },
        small(
          button("Enroll", () => this.name(card), { icon: "enroll", kind: "primary", "aria-label": `Enroll ${named}` }),
        ),
        small(button("Merge", () => this.merge(card), { icon: "move", "aria-label": `Merge ${named}` })),
        group.face_count > group.faces.length &&
          small(button("Show all faces", () => this.showAll(card), { "aria-label": `Show all faces of ${named}` })),
        small(split),
      ),
    );
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
    const known = subject && { id: subject, name };
    return askWho(this.gallery, this.signal, "Two groups may be one person.", (found) => this.enroll(card, found), {
      yes: "Enroll",
      known,
    });
  }

  async merge(card) {
    const groups = await all(`${this.path}/groups`, { query: { limit: 500 }, signal: this.signal, most: 2000 });
    const others = groups.filter((one) => one.id !== card.group.id);
    if (others.length === 0) return toast("There is no other group.");
    const told = (one) =>
      `${one.subject ? `${words.called({ id: one.subject, name: one.name })} (group ${one.id.slice(1)})` : `Group ${one.id.slice(1)}`}, ${counted(one.face_count, "face")}`;
    const select = h(
      "select",
      {},
      others.map((one) => h("option", { value: one.id }, told(one))),
    );
    const shown = h("div", { class: "album-faces" });
    const preview = () =>
      fill(
        shown,
        others
          .find((one) => one.id === select.value)
          .faces.slice(0, 4)
          .map((one) => this.pictures.albumFace(this.album, one.id, `Face in ${one.photo}`)),
      );
    select.addEventListener("change", preview);
    preview();
    ask("Merge two groups", "Merge", [field("The same person as", select), shown], async () => {
      const group = await call("POST", `${this.own(card)}/merge`, { json: { into: select.value } });
      const target = this.element.querySelector(`[data-group="${group.id}"]`);
      const fresh = this.card(group);
      if (target) target.replaceWith(fresh);
      else this.several.list.append(fresh);
      if (target?.closest("details") && group.face_count > 1) this.several.list.append(fresh);
      this.leave(card);
      this.say(`Merged into ${told(group)}.`);
    });
  }

  async split(card) {
    const faces = [...card.chosen].slice(0, MAX_SPLIT);
    const made = await call("POST", `${this.own(card)}/split`, { json: { faces } });
    const { data } = await call("GET", `${this.own(card)}/faces`, { query: { limit: 8 }, signal: this.signal });
    const left = card.group.face_count - faces.length;
    this.update(card, { ...card.group, faces: data, face_count: left });
    card.place.after(this.card(made));
    this.say(`${counted(faces.length, "face")} taken out, as group ${made.id.slice(1)}.`);
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
    this.say(
      `${counted(enrolled, "photo")} of ${words.called(person)} enrolled${answer.remaining_count ? `, ${whole(answer.remaining_count)} not` : ""}.`,
    );
    if (answer.remaining_count === 0) return this.leave(card);
    const photos = new Map(group.faces.map((one) => [one.id, one.photo]));
    card.refused =
      answer.refused.length > 0 &&
      h(
        "details",
        { class: "details", open: true },
        h("summary", {}, "Refused faces"),
        refusalList(answer.refused.map(({ face, problem }) => [photos.get(face) ?? "Face", problem])),
        button("Enroll them anyway", () => this.anyway(card, person), { kind: "danger" }),
      );
    const { data } = await call("GET", `${this.own(card)}/faces`, { query: { limit: 8 }, signal: this.signal });
    const whose = enrolled > 0 && { subject: person.id, name: person.name };
    this.update(card, { ...group, ...whose, faces: data, face_count: answer.remaining_count });
  }

  /** Enroll faces that a check refused. */
  async anyway(card, person) {
    const sure = await confirmed({
      title: "Enroll the refused faces?",
      text: "Only do this if they show this person: a photo of somebody else makes Kith confuse the two.",
      yes: "Enroll",
      danger: false,
    });
    if (sure)
      await this.enroll(card, person, { allow_duplicate: true, allow_inconsistent: true, allow_low_quality: true });
  }
}
