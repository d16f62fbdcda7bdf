import { attemptKey, call, patiently, stubbornly, subjectPath } from "../api.js";
import { galleries, galleryField, personField } from "../choices.js";
import { fill, h, icon } from "../dom.js";
import { readingOrder } from "../layout.js";
import { counted } from "../numbers.js";
import { personForm } from "../person_form.js";
import { DESK, bodyOf, cropped, measured, open, picker, stage, thumbnail } from "../photo.js";
import { Pictures, keepHint, sides } from "../stored.js";
import { button, confirmed, empty, field, heading, linkButton, loading, tell, toast, unique } from "../ui.js";
import * as words from "../words.js";

export const title = () => "Enroll";

export function render(params, signal) {
  return h(
    "div",
    { class: "page" },
    heading(
      "Enroll",
      "Add photos of a person, so that searches find them. Two or three different photos are better than one.",
    ),
    loading(async () => {
      const known = await galleries(signal);
      if (known?.length === 0)
        return empty(
          "gallery",
          "Create a gallery first",
          "People are enrolled in a gallery, such as a staff, a club or a family.",
          linkButton("Create a gallery", "#/galleries?new=1", { kind: "primary", icon: "plus" }),
        );
      return desk(known, params, signal);
    }, "Loading galleries…"),
  );
}

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
  const list = h("ul", { class: "stack", "aria-label": "Photos to enroll" });
  const told = h("p", { class: "unseen", role: "status" });
  const who = whoForm(known, params, signal);
  const go = button("Enroll", enrollAll, { kind: "primary", icon: "enroll", disabled: true });
  const done = h("div", { class: "stack" });

  async function take(files) {
    for (const file of files) {
      const item = {
        photo: await open(file, signal),
        state: "looking",
        faces: null,
        chosen: null,
        problem: null,
        key: null,
        allowed: {},
      };
      items.push(item);
      list.append((item.place = h("li", { class: "card" })));
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
    const ready = items.filter(
      (one) => one.state === "ready" && one.chosen !== -1 && (one.chosen !== null || one.faces === null),
    );
    go.disabled = ready.length === 0;
    go.querySelector("span").textContent = ready.length > 1 ? `Enroll ${ready.length} photos` : "Enroll";
    item.ready = ready.includes(item);
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
    const drop =
      state !== "busy" &&
      state !== "enrolled" &&
      button("Remove", () => remove(item), { kind: "quiet", icon: "close" });
    drop && drop.classList.add("small");
    const picture = faces?.[chosen] ? thumbnail(photo, faces[chosen].box, 96) : preview(photo);
    const line = (...content) =>
      h(
        "div",
        { class: "photo-row" },
        picture,
        h("div", { class: "stack tight" }, h("p", { class: "file" }, photo.file.name), ...content),
      );
    if (state === "looking") return line(waitLine("Looking for faces…"));
    if (state === "busy") return line(waitLine("Enrolling…"));
    if (state === "enrolled")
      return line(
        h(
          "p",
          {},
          h("span", { class: "outcome identified" }, icon("check"), "Enrolled"),
          ` A ${words.quality(item.score)} photo.`,
        ),
      );
    if (state === "refused") return line(refusal(item, drop));
    if (chosen === -1)
      return line(
        h("p", {}, h("strong", {}, "No face found. "), "The photo must show an upright, visible and large face."),
        h("div", { class: "actions" }, drop),
      );
    if (faces === null) return line(h("p", { class: "hint" }, "Ready."), h("div", { class: "actions" }, drop));
    if (faces.length > 1 && chosen === null)
      return [
        h("h2", {}, `${faces.length} faces. Which one do you want to enroll?`),
        chooser(item),
        h("div", { class: "actions" }, drop),
      ];
    const { quality } = faces[chosen];
    const another =
      faces.length > 1 &&
      photo.drawable &&
      button("Another face", () => ((item.chosen = item.wanted = null), show(item)), { kind: "quiet" });
    another && another.classList.add("small");
    return line(
      h(
        "p",
        {},
        `A ${words.quality(quality.score)} photo of a face.`,
        faces.length > 1 &&
          !photo.drawable &&
          " It is the largest face. This browser cannot show the file, so you cannot choose another one.",
      ),
      quality.reasons.length > 0 &&
        h(
          "ul",
          { class: "bullets" },
          quality.reasons.map((name) => h("li", {}, words.reason(name, faces[chosen]))),
        ),
      h("div", { class: "actions" }, another, drop),
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
    const small = (element) => (element.classList.add("small"), element);
    const compared = () => other && beside(item, other);
    return [
      h(
        "p",
        { class: "refused", role: "alert" },
        icon("warning"),
        h("span", {}, h("strong", {}, `${said.title}. `), said.text, " ", said.remedy),
      ),
      compared(),
      h(
        "div",
        { class: "actions" },
        other &&
          small(
            linkButton(
              `Show “${other}”`,
              `#/galleries/${encodeURIComponent(item.gallery)}/subjects/${encodeURIComponent(other)}`,
            ),
          ),
        other &&
          small(
            button(
              `It is “${other}”: enroll it there`,
              () => (
                (item.state = "busy"),
                enrollOne(item, { ...item.person, id: other, label: other, fresh: false, about: null })
              ),
            ),
          ),
        problem.code === "several_faces" &&
          small(button("Enroll the largest", () => ((item.allowed.face = "largest"), again(item)))),
        allow &&
          small(
            button(label, async () => {
              if (
                !(await confirmed({ title: question, text: meaning, shown: compared(), yes: "Enroll", danger: false }))
              )
                return;
              item.allowed[allow] = true;
              again(item);
            }),
          ),
        words.mayPass(problem) &&
          small(
            button("Try again", () => (item.person ? again(item) : ((item.state = "looking"), show(item), look(item)))),
          ),
        drop,
      ),
    ];
  }

  const pictures = new Map(); // by gallery

  /** The face of a photo beside the stored picture of an enrolled person; a hint where the gallery stores none. */
  function beside(item, subject) {
    const keeps = known?.find((one) => one.name === item.gallery)?.keep_crops;
    if (keeps === undefined) return null;
    if (!keeps) return keepHint(item.gallery);
    if (!pictures.has(item.gallery)) pictures.set(item.gallery, new Pictures(item.gallery, signal));
    const { photo, faces, chosen } = item;
    const face = faces?.[chosen] ? thumbnail(photo, faces[chosen].box, 96) : preview(photo);
    return sides([
      ["This photo", face],
      [subject, pictures.get(item.gallery).person(subject, `Stored picture of ${subject}`)],
    ]);
  }

  const again = (item) => enrollOne(item, item.person);

  async function enrollAll() {
    const person = await who.person().catch(who.failed);
    if (!person) return;
    for (const item of items.filter((one) => one.state === "ready" && one.ready)) {
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
    const { photo, faces, chosen } = item;
    const several = faces !== null && faces.length > 1;
    const cut = several && photo.drawable;
    try {
      const file = cut
        ? await cropped(
            photo,
            faces[chosen],
            faces.filter((_, i) => i !== chosen),
          )
        : photo.file;
      const options = { ...(several && { face: "largest" }), ...item.allowed };
      // Without `signal`: leaving the page must not interrupt the enrollment before the name is set.
      const headers = { "Idempotency-Key": item.key, ...(person.fresh && { "If-None-Match": "*" }) };
      const request = { ...bodyOf(file, options), headers };
      const path = `${subjectPath(person.gallery, person.id)}/templates`;
      const answer = await patiently(() => stubbornly(() => call("POST", path, request), signal), signal);
      item.score = answer.results[0].face.quality.score;
      item.state = "enrolled";
      made(person);
      await describe(person);
    } catch (error) {
      if (error.code === "subject_exists" && !signal.aborted) {
        Object.assign(item, { state: "ready", key: null });
        who.taken(person).catch(who.failed);
      } else if (item.state === "enrolled" || signal.aborted) tell(error);
      else Object.assign(item, { state: "refused", problem: error });
    }
    show(item);
  }

  /** Mark the person as existing for all photos on this page, also for refused ones. */
  function made(person) {
    if (!person.fresh) return;
    for (const one of [person, ...same(person)]) one.fresh = false;
    who.recount();
  }

  /** The person objects of all photos with the same person. Each click on “Enroll” reads the form again. */
  const same = ({ gallery, id }) =>
    items.map((item) => item.person).filter((one) => one?.gallery === gallery && one.id === id);

  /** Save the typed data of the person. After an error it is saved with the next photo, or by the button. */
  async function describe(person) {
    try {
      if (person.about) await call("PATCH", subjectPath(person.gallery, person.id), { json: person.about });
      for (const one of [person, ...same(person)]) one.about = null; // older input is outdated
      who.know(person);
    } catch (error) {
      who.owes(person);
      throw error;
    } finally {
      finished(person);
    }
  }

  async function repeat(person) {
    try {
      await describe(person);
      toast("Saved.");
    } finally {
      done.querySelector("button, a").focus(); // the clicked button was replaced
    }
  }

  function finished(person) {
    const owed = Boolean(person.about);
    const at = `#/galleries/${encodeURIComponent(person.gallery)}/subjects/${encodeURIComponent(person.id)}`;
    fill(
      done,
      h(
        "section",
        { class: "notice" },
        icon(owed ? "warning" : "check"),
        h(
          "div",
          {},
          h("h2", {}, owed ? `${person.label} is enrolled without the other data` : `${person.label} is enrolled`),
          h(
            "p",
            {},
            owed
              ? `The id in “${person.gallery}” is “${person.id}”. Name, tags and other fields are not saved yet.`
              : `Searches in “${person.gallery}” now find this person.`,
          ),
          h(
            "div",
            { class: "actions" },
            owed && button("Save the other data", () => repeat(person), { kind: "primary" }),
            linkButton("Show person", at),
            linkButton("Try it: identify", `#/identify?gallery=${encodeURIComponent(person.gallery)}`),
            button("Enroll another person", next),
          ),
        ),
      ),
    );
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
  return h(
    "div",
    { class: "columns" },
    h("div", { class: "stack" }, pick, list),
    h(
      "div",
      { class: "stack" },
      h(
        "section",
        { class: "card", "aria-label": "Person" },
        h("h2", {}, "Person"),
        who.element,
        h("div", { class: "actions" }, go),
      ),
      told,
      done,
    ),
  );
}

/** The person form: a new or an enrolled person. */
function whoForm(known, params, signal) {
  const about = personForm();
  const id = h("input", { type: "text", autocomplete: "off", spellcheck: false, maxLength: 128 });
  let ownId = false;
  about.name.addEventListener("input", () => {
    if (!ownId) id.value = words.idFrom(about.name.value);
  });
  id.addEventListener("input", () => (ownId = id.value !== ""));
  const person = personField("Whose photos are these?", signal);
  const gallery = galleryField(known, (name) => person.load(name).catch(tell), { chosen: params.gallery });
  const group = unique("who");
  const fresh = h("input", { type: "radio", name: group, checked: params.subject === undefined });
  const there = h("input", { type: "radio", name: group, checked: params.subject !== undefined });
  const problem = h("p", { class: "refused", role: "alert" });
  const newFields = h(
    "div",
    { class: "stack" },
    about.elements[0],
    field("Id", id, "What other programs call them; it cannot be changed later."),
    about.elements.slice(1),
  );
  const swap = () => {
    newFields.hidden = !fresh.checked;
    person.hidden = fresh.checked;
    fill(problem);
  };
  for (const one of [fresh, there]) one.addEventListener("change", swap);
  swap();
  if (gallery.value)
    person
      .load(gallery.value)
      .then(async () => {
        if (!params.subject) return;
        person.input.value = params.subject;
        const found = await person.find();
        if (found) person.set(found);
      })
      .catch(tell);
  const refuse = (text, input, ...more) => {
    fill(problem, icon("warning"), h("span", {}, text, " ", ...more));
    input.focus();
    return null;
  };

  /** The person with this id; null if there is none, or if the key cannot read it. */
  const holder = ({ gallery: into, id: wanted }) =>
    call("GET", subjectPath(into, wanted), { signal }).catch((error) => {
      if (error.code === "subject_not_found" || error.code === "forbidden") return null;
      throw error;
    });

  /** Report that the id is taken. Nothing was changed. */
  async function taken(wanted) {
    const name = (await holder(wanted))?.name;
    return refuse(
      `The id “${wanted.id}” is taken${name ? ` by ${name}` : ""}.`,
      id,
      "If it is the same person, choose “Enrolled person”. Otherwise enter another id.",
    );
  }

  let owed = null; // a person created here whose typed data is not saved yet; the next attempt reuses the id

  return {
    element: h(
      "div",
      { class: "stack" },
      h(
        "div",
        { class: "stack tight" },
        gallery,
        known !== null && h("a", { class: "hint", href: "#/galleries?new=1" }, "Create another gallery"),
      ),
      h(
        "fieldset",
        {},
        h("legend", { class: "unseen" }, "New or enrolled"),
        h(
          "div",
          { class: "row" },
          h("label", { class: "check" }, fresh, "New person"),
          h("label", { class: "check" }, there, "Enrolled person"),
        ),
      ),
      newFields,
      person,
      problem,
    ),
    /** {gallery, id, label, fresh, about}, or null after a message about missing input. */
    async person() {
      fill(problem);
      const into = gallery.value;
      if (there.checked) {
        const found = await person.find();
        if (!found) return refuse(person.unfound, person.input);
        return { gallery: into, id: found.id, label: words.called(found), fresh: false };
      }
      const told = about.read();
      const chosen = id.value.trim();
      if (!chosen) return refuse("Enter a name or an id.", about.name);
      const unfit = words.idRefusal(chosen);
      if (unfit) return refuse(unfit, id);
      const wanted = {
        gallery: into,
        id: chosen,
        label: told.name ?? chosen,
        name: told.name,
        fresh: true,
        about: given(told),
      };
      if (owed?.gallery === into && owed.id === chosen) return { ...wanted, fresh: false };
      return (await holder(wanted)) ? taken(wanted) : wanted;
    },
    taken,
    /** Renew the numbers of people in the list of galleries. */
    recount: () => gallery.recount?.().catch(() => {}), // the next page load renews them
    /** Show an error beside the form: a toast would cover the button. */
    failed(error) {
      if (error.name === "AbortError") return;
      const said = words.problem(error);
      fill(problem, icon("warning"), h("span", {}, said.text, " ", said.remedy));
    },
    /** Keep typed data that could not be saved. */
    owes(who) {
      owed = who;
    },
    /** Add the next photos to the same person. */
    know(who) {
      owed = null;
      if (!fresh.checked) return;
      there.checked = true;
      person.set({ id: who.id, name: who.name });
      swap();
    },
    clear() {
      owed = null;
      about.clear();
      id.value = person.input.value = "";
      ownId = false;
      fresh.checked = true;
      swap();
    },
  };
}

/** The typed fields without empty ones; null if all are empty. */
function given(about) {
  const said = Object.entries(about).filter(
    ([, value]) => value !== null && (typeof value === "string" || Object.keys(value).length > 0),
  );
  return said.length > 0 ? Object.fromEntries(said) : null;
}

const preview = (photo) =>
  photo.drawable
    ? h("img", { class: "thumb large", src: photo.url, alt: "" })
    : h("span", { class: "thumb large blank", "aria-hidden": "true" }, icon("photo"));

const waitLine = (text) =>
  h("p", { class: "wait-line", role: "status" }, h("span", { class: "spinner", "aria-hidden": "true" }), text);

const area = ([x0, y0, x1, y1]) => (x1 - x0) * (y1 - y0);
const largest = (faces) => faces.reduce((best, face, i) => (area(face.box) > area(faces[best].box) ? i : best), 0);
/** Compare boxes of two requests, which can differ by rounding. */
const nearlySame = (one, other) => one.every((value, i) => Math.abs(value - other[i]) < 3);
