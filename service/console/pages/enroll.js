import { attemptKey, call, patiently, subjectPage, subjectPath } from "../api.js";
import { galleryDesk, galleryField } from "../choices.js";
import { confirmed } from "../dialogs.js";
import { each, fill, h, icon } from "../dom.js";
import { readingOrder } from "../layout.js";
import { counted } from "../numbers.js";
import { whoFields } from "../asking.js";
import { personForm } from "../person_form.js";
import { DESK, bodyOf, cropped, measured, open, picker, stage, thumbnail } from "../photo.js";
import { Pictures, keepHint, sides } from "../stored.js";
import { refused } from "../forms.js";
import { button, linkButton, notice, outcome, tell, toast, waiting } from "../ui.js";
import * as words from "../words.js";

export const title = () => "Enroll";

const LEAD = "Add photos of a person, so that searches find them. Two or three different photos are better than one.";
export const render = (params, signal) => galleryDesk("Enroll", LEAD, desk, params, signal);

// Overrides of refusals: option, label, question, consequence.
const ANYWAY = {
  duplicate_subject: [
    "allow_duplicate",
    "They are two people: enroll anyway",
    "Are they two different people?",
    "Both are enrolled. If they are one person, searches find two names for one face.",
  ],
  inconsistent_template: [
    "allow_inconsistent",
    "It is the same person: enroll anyway",
    "Is it the same person?",
    "A photo of another person under this name makes Kith confuse the two.",
  ],
  low_quality: [
    "allow_low_quality",
    "Enroll anyway",
    "Enroll a photo of low quality?",
    "Low quality causes more missed and more wrong matches.",
  ],
  not_live: [
    "allow_not_live",
    "Enroll anyway",
    "Enroll a picture of a person?",
    "Do this only for trusted photos, such as a passport photo.",
  ],
};

function desk(known, params, signal) {
  const items = [];
  const made = new Set(); // people with a photo from this page
  const nameOf = ({ gallery, id }) => `${gallery}/${id}`;
  const list = h("ul.stack", { "aria-label": "Photos to enroll" });
  const told = h("p.unseen", { role: "status" });
  const who = whoForm(known, params, signal);
  const go = button("Enroll", enrollAll, { kind: "primary", icon: "enroll", disabled: true });
  const done = h("div.stack");

  async function take(files) {
    for (const file of files) {
      const photo = await open(file, signal);
      const item = { photo, state: "looking", faces: null, chosen: null, key: null, allowed: {} };
      items.push(item);
      list.append((item.place = h("li.card")));
      show(item);
      look(item);
    }
    pick.classList.add("compact");
  }

  /** Detect the faces before enrollment. Keys that can only enroll skip this step. */
  async function look(item) {
    try {
      const request = { ...bodyOf(item.photo.file, { detail: "medium" }), signal };
      const answer = await patiently(() => call("POST", "/v1/detect", request), signal);
      const [found] = answer.images;
      item.faces = readingOrder(found.faces, (face) => face);
      measured(item.photo, found);
      item.chosen = choose(item);
      item.state = "ready";
    } catch (error) {
      if (signal.aborted) return;
      item.state = error.code === "forbidden" ? "ready" : "refused";
      item.problem = item.state === "refused" ? error : null;
    }
    show(item);
  }

  function choose({ faces, photo, wanted }) {
    if (faces.length <= 1) return faces.length - 1;
    if (!photo.drawable) return largest(faces); // it cannot be cropped
    const same = wanted ? faces.findIndex((face) => nearlySame(face.box, wanted)) : -1;
    return same === -1 ? null : same;
  }

  function show(item) {
    fill(item.place, row(item));
    const ready = items.filter(isReady);
    go.disabled = ready.length === 0;
    go.querySelector("span").textContent = ready.length > 1 ? `Enroll ${ready.length} photos` : "Enroll";
  }

  function remove(item) {
    const at = items.indexOf(item);
    const after = (items[at + 1] ?? items[at - 1])?.place ?? pick;
    const focused = item.place.contains(document.activeElement);
    items.splice(at, 1);
    item.place.remove();
    if (items.length) show(items[0]);
    else {
      go.disabled = true;
      pick.classList.remove("compact");
    }
    if (focused) after.querySelector("button")?.focus(); // the focused row is removed
  }

  function row(item) {
    const { photo, faces, chosen, state } = item;
    const small = (label, act) => button(label, act, { kind: "quiet", small: true });
    const drop = button("Remove", () => remove(item), { kind: "quiet", icon: "close", small: true });
    const face = faces?.[chosen];
    const line = (...content) =>
      h("div.photo-row", [faceOf(item), h("div.stack.tight", [h("p.file", photo.file.name), ...content])]);
    if (state === "looking") return line(waiting("Looking for faces…"));
    if (state === "busy") return line(waiting("Enrolling…"));
    if (state === "enrolled")
      return line(h("p", [outcome("identified", "check", "Enrolled"), ` A ${words.quality(item.score)} photo.`]));
    if (state === "refused") return line(refusal(item, drop));
    if (faces === null) return line(h("p.hint", "Ready."), h("div.actions", drop));
    const none = [h("strong", "No face found. "), "The photo must show an upright, visible and large face."];
    if (chosen === -1) return line(h("p", none), h("div.actions", drop));
    const which = `${faces.length} faces. Which one do you want to enroll?`;
    if (!face) return [h("h2", which), chooser(item), h("div.actions", drop)];
    const several = faces.length > 1;
    const another = several && photo.drawable;
    const largest = " It is the largest face. This browser cannot show the file, so you cannot choose another one.";
    return line(
      h("p", [`A ${words.quality(face.quality.score)} photo of a face.`, several && !another && largest]),
      face.quality.reasons.length > 0 &&
        each("ul.bullets", face.quality.reasons, (name) => h("li", words.reason(name, face))),
      h("div.actions", [
        another && small("Another face", () => ((item.chosen = item.wanted = null), show(item))),
        drop,
      ]),
    );
  }

  function chooser(item) {
    const marks = item.faces.map((face, i) => ({ face, label: `Choose face ${i + 1}`, outcome: "" }));
    return stage(item.photo, marks, {
      alt: `${item.photo.file.name}, ${item.faces.length} faces`,
      onChoose: (i) => {
        item.chosen = i;
        show(item);
        item.place.querySelector("button")?.focus();
      },
    });
  }

  function refusal(item, drop) {
    const { problem } = item;
    const said = words.problem(problem);
    const [allow, label, question, meaning] = ANYWAY[problem.code] ?? [];
    const other = problem.code === "duplicate_subject" && problem.document.subject;
    const compared = () => other && beside(item, other);
    const act = (text, onClick) => button(text, onClick, { small: true });
    const there = () => {
      item.state = "busy";
      return enrollOne(item, { ...item.person, id: other, label: other, fresh: false });
    };
    const allowed = (option, value = true) => ((item.allowed[option] = value), again(item));
    const anyway = async () => {
      if (await confirmed(question, meaning, "Enroll", { shown: compared(), danger: false })) allowed(allow);
    };
    const repeat = () => (item.person ? again(item) : ((item.state = "looking"), show(item), look(item)));
    return [
      refused(h("strong", `${said.title}. `), said.text, " ", said.remedy),
      compared(),
      h("div.actions", [
        other && [
          linkButton(`Show “${other}”`, subjectPage(item.gallery, other), { small: true }),
          act(`It is “${other}”: enroll it there`, there),
        ],
        problem.code === "several_faces" && act("Enroll the largest", () => allowed("face", "largest")),
        allow && act(label, anyway),
        words.mayPass(problem) && act("Try again", repeat),
        drop,
      ]),
    ];
  }

  const pictures = new Map(); // by gallery

  /** The face of a photo beside the stored picture of an enrolled person; a hint where the gallery stores none. */
  function beside(item, subject) {
    const keeps = known?.find((one) => one.name === item.gallery)?.keep_crops;
    if (keeps === undefined) return null;
    if (!keeps) return keepHint(item.gallery);
    if (!pictures.has(item.gallery)) pictures.set(item.gallery, new Pictures(item.gallery, signal));
    return sides([
      ["This photo", faceOf(item)],
      [subject, pictures.get(item.gallery).of({ subject: subject }, `Stored picture of ${subject}`)],
    ]);
  }

  const again = (item) => enrollOne(item, item.person);

  async function enrollAll() {
    const person = await who.person().catch(who.failed);
    if (!person) return;
    for (const item of items.filter(isReady)) {
      if (signal.aborted) return;
      await enrollOne(item, person);
      if (item.state === "ready") return; // the id is taken: change the id, not the photos
    }
    const left = items.filter((one) => one.state !== "enrolled").length;
    const taken = items.length - left;
    (items.find((one) => one.state === "refused")?.place ?? done).scrollIntoView({ block: "nearest" });
    told.textContent = `${counted(taken, "photo")} enrolled${left ? `, ${left} not` : ""}.`;
  }

  async function enrollOne(item, person) {
    if (item.problem && !words.mayPass(item.problem)) item.key = null; // the repeated request differs from the refused one
    item.key ??= attemptKey();
    Object.assign(item, { state: "busy", problem: null, person, gallery: person.gallery });
    show(item);
    const fresh = person.fresh && !made.has(nameOf(person)); // another photo of this page may have made the person
    const { photo, faces, chosen } = item;
    const several = faces !== null && faces.length > 1;
    const cut = several && photo.drawable;
    try {
      const others = faces?.filter((_, i) => i !== chosen);
      const file = cut ? await cropped(photo, faces[chosen], others) : photo.file;
      const options = { ...(several && { face: "largest" }), ...item.allowed };
      // Without `signal`: leaving the page must not interrupt the enrollment before the name is set.
      const headers = { "Idempotency-Key": item.key, ...(fresh && { "If-None-Match": "*" }) };
      const request = { ...bodyOf(file, options), headers };
      const path = `${subjectPath(person.gallery, person.id)}/templates`;
      const answer = await patiently(() => call("POST", path, request), signal);
      item.score = answer.results[0].face.quality.score;
      item.state = "enrolled";
      made.add(nameOf(person));
      const unsaved = fresh && Object.keys(person.about).length > 0 ? await describe(person) : null;
      who.know(person);
      finished(person, unsaved);
    } catch (error) {
      if (["subject_exists", "invalid_request"].includes(error.code) && !signal.aborted) {
        Object.assign(item, { state: "ready", key: null });
        who.failed(error);
      } else if (item.state === "enrolled" || signal.aborted) tell(error);
      else Object.assign(item, { state: "refused", problem: error });
    }
    show(item);
  }

  /** Save the typed data of a new person. Returns the error, or null. */
  const describe = (person) =>
    patiently(() => call("PATCH", subjectPath(person.gallery, person.id), { json: person.about }), signal).then(
      () => null,
      (error) => error,
    );

  function finished(person, unsaved) {
    const text = unsaved
      ? `Name, tags and other fields are not saved: ${words.problem(unsaved).text} Enter them on the person’s page.`
      : `Searches in “${person.gallery}” now find this person.`;
    const actions = [
      linkButton("Show person", subjectPage(person.gallery, person.id)),
      linkButton("Try it: identify", `#/identify?gallery=${encodeURIComponent(person.gallery)}`),
      button("Enroll another person", next),
    ];
    const title = `${person.label} is enrolled${unsaved ? " without the other data" : ""}`;
    fill(done, notice(unsaved ? "warning" : "check", [h("h2", title), h("p", text), h("div.actions", actions)]));
  }

  function next() {
    for (const item of [...items]) remove(item);
    fill(done);
    who.clear();
    toast("Ready for the next person.");
  }

  const pick = picker(take, { signal, title: "Drop photos of one person here" });
  if (DESK.photo) {
    const { photo, box } = DESK;
    DESK.photo = DESK.box = null; // keep the photos to return to
    queueMicrotask(async () => {
      await take([photo.file]);
      items[0].wanted = box;
    });
  }
  return h("div.columns", [
    h("div.stack", [pick, list]),
    h("div.stack", [
      h("section.card", { "aria-label": "Person" }, [h("h2", "Person"), who.element, h("div.actions", go)]),
      told,
      done,
    ]),
  ]);
}

/** The person form: a new or an enrolled person. */
function whoForm(known, params, signal) {
  const about = personForm();
  const problem = h("div");
  const gallery = galleryField(known, (name) => fields.person.load(name).catch(tell), { chosen: params.gallery });
  const fields = whoFields(signal, {
    label: "Whose photos are these?",
    isNew: params.subject === undefined,
    texts: ["New person", "Enrolled person"],
    name: about.name,
    between: about.elements.slice(1),
    onSwap: () => fill(problem),
  });
  const { person, id } = fields;
  const begin = async () => {
    await person.load(gallery.value);
    if (!params.subject) return;
    person.input.value = params.subject;
    const found = await person.find();
    if (found) person.set(found);
  };
  if (gallery.value) begin().catch(tell);
  const refuse = (input, ...text) => {
    fill(problem, refused(...text));
    input.focus();
    return null;
  };

  return {
    element: h("div.stack", [
      h("div.stack.tight", [
        gallery,
        known !== null && h("a.hint", { href: "#/galleries?new=1" }, "Create another gallery"),
      ]),
      fields.elements,
      problem,
    ]),
    /** {gallery, id, name, label, fresh, about}, or null after a message about missing input. */
    async person() {
      fill(problem);
      const into = gallery.value;
      const found = await fields.who();
      if (typeof found === "string")
        return refuse(!fields.fresh.checked ? person.input : id.value.trim() ? id : about.name, found);
      const wanted = { gallery: into, id: found.id, name: found.name, label: words.called(found), fresh: found.isNew };
      if (!found.isNew) return wanted;
      wanted.about = about.changed();
      return wanted;
    },
    /** Show an error beside the form: a toast would cover the button. */
    failed(error) {
      if (error.name === "AbortError") return;
      const { text, remedy } = words.problem(error);
      const taken = "If it is the same person, choose “Enrolled person”. Otherwise enter another id.";
      refuse(id, text, " ", error.code === "subject_exists" ? taken : remedy);
    },
    /** Add the next photos to the same person. */
    know(who) {
      if (fields.fresh.checked) fields.choose({ id: who.id, name: who.name });
    },
    clear() {
      about.clear();
      person.input.value = "";
      fields.choose(null);
    },
  };
}

const isReady = ({ state, faces, chosen }) => state === "ready" && (faces === null || Boolean(faces[chosen]));

function faceOf({ photo, faces, chosen }) {
  if (faces?.[chosen]) return thumbnail(photo, faces[chosen].box, 96);
  if (photo.drawable) return h("img.thumb.large", { src: photo.url, alt: "" });
  return h("span.thumb.large.blank", { "aria-hidden": "true" }, icon("photo"));
}

const area = ([x0, y0, x1, y1]) => (x1 - x0) * (y1 - y0);
const largest = (faces) => faces.reduce((best, face, i) => (area(face.box) > area(faces[best].box) ? i : best), 0);
/** Compare boxes of two requests, which can differ by rounding. */
const nearlySame = (one, other) => one.every((value, i) => Math.abs(value - other[i]) < 3);
