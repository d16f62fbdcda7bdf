import { all, call, decoysPath, enrollPage, galleryPage, galleryPath, subjectPath, templatePath } from "../api.js";
import { Aside } from "../aside.js";
import { personField } from "../choices.js";
import { ask, careful } from "../dialogs.js";
import { each, fill, h, icon } from "../dom.js";
import { download } from "../files.js";
import { counted, when } from "../numbers.js";
import { personForm } from "../person_form.js";
import { briefly, eraser } from "../receipt.js";
import { Pictures, keepHint } from "../stored.js";
import { saveForm } from "../forms.js";
import { button, empty, facts, folded, heading, linkButton, loading, problemBox, tell, toast } from "../ui.js";
import * as words from "../words.js";

export const title = ({ subject }) => subject;

export function render({ gallery, subject }, signal) {
  const page = h("div.page");
  const at = galleryPage(gallery);
  const content = loading(async () => {
    try {
      const [person, templates, { data: decoys }, { keep_crops: keeps }] = await Promise.all([
        call("GET", subjectPath(gallery, subject), { parse: words.parsed, signal }),
        all(`${subjectPath(gallery, subject)}/templates`, { query: { limit: 1000 }, signal }),
        call("GET", decoysPath(gallery, subject), { signal }),
        call("GET", galleryPath(gallery), { signal }),
      ]);
      return view({ gallery, person, templates, decoys, keeps }, page, signal);
    } catch (error) {
      if (error.name === "AbortError" || words.mayPass(error)) throw error;
      return [heading(subject), problemBox(error)];
    }
  });
  return fill(
    page,
    h("nav", { "aria-label": "Breadcrumb" }, h("a.back", { href: at }, [icon("back"), gallery])),
    content,
  );
}

function view({ gallery, person, templates, decoys, keeps }, page, signal) {
  const adds = () => linkButton("Add photos", enrollPage(gallery, person.id), { kind: "primary", icon: "plus" });
  return h("div.stack.wide", [
    heading(words.called(person), `In “${gallery}” since ${when(person.created_at)}.`, adds()),
    h("div.columns", [
      h("div.stack", [photos({ gallery, person, templates, keeps }, adds, signal), mistakes(gallery, person, decoys)]),
      h("div.stack", [edit(gallery, person, signal), rights(gallery, person, templates, page, signal)]),
    ]),
  ]);
}

/** The photos of the person. Only quality values are stored, and small pictures if the gallery keeps them. */
function photos({ gallery, person, templates, keeps }, adds, signal) {
  const section = h("section.stack", { "aria-label": "Photos", tabindex: "-1" });
  const pictures = new Pictures(gallery, signal);
  const none = empty("photo", "No photos yet", "Without a photo, searches cannot find this person.", adds());
  const list = () => [
    h("h2", counted(templates.length, "photo")),
    !keeps && keepHint(gallery),
    each("ul.stack", templates, (one) => h("li.card", line(one))),
  ];
  const show = () => fill(section, templates.length === 0 ? none : list());
  const gone = (template) => {
    templates.splice(templates.indexOf(template), 1);
    show();
    section.focus(); // the focused button was removed
  };

  function line(template) {
    const { quality, id } = template;
    const values = () => [
      ...words.qualities(quality),
      ["Quality score", quality.score.toFixed(2)],
      ["Template", h("code", id.slice(0, 12))],
    ];
    return h("div.photo-row", [
      keeps && quality
        ? pictures.of({ subject: person.id, template: id }, `Stored picture of ${words.called(person)}`)
        : h("span.thumb.blank", { "aria-hidden": "true" }, icon(quality ? "enroll" : "hygiene")),
      h("div.stack.tight", [
        h("p", [
          h("strong", quality ? `Photo, ${words.quality(quality.score)} quality` : "Embedding"),
          `, added ${when(template.created_at)}`,
        ]),
        h("div.actions", [
          button("Move", () => move(template), { icon: "move", small: true }),
          careful("Delete", question, () => remove(template), { icon: "trash", small: true }),
        ]),
        quality && folded("Details", facts(values())),
      ]),
    ]);
  }

  const question = () => [
    "Delete this photo?",
    templates.length === 1
      ? `It is the only photo. Searches cannot find ${words.called(person)} until you add another one.`
      : "This cannot be undone.",
    "Delete",
  ];

  async function remove(template) {
    const answer = await call("DELETE", templatePath(gallery, person.id, template.id));
    gone(template);
    toast(`Deleted. ${briefly(answer)}`);
  }

  async function move(template) {
    const to = personField("Person", signal);
    await to.load(gallery).catch(tell);
    if (signal.aborted) return;
    ask("Move this photo", "Move", to, async () => {
      const found = await to.find();
      if (!found) return to.unfound;
      if (found.id === person.id) return "The photo already belongs to this person.";
      await call("PATCH", templatePath(gallery, person.id, template.id), { json: { subject: found.id } });
      return () => {
        gone(template);
        toast(`Moved to ${words.called(found)}.`);
      };
    });
  }
  show();
  return section;
}

/** The people who were mistaken for the person. No pictures of them are stored. */
function mistakes(gallery, person, decoys) {
  const section = h("section.stack", { "aria-label": "Corrected mistakes", tabindex: "-1" });
  const name = words.called(person);
  const line = (decoy) => {
    const remove = async () => {
      await call("DELETE", `${decoysPath(gallery, person.id)}/${decoy.id}`);
      decoys.splice(decoys.indexOf(decoy), 1);
      show();
      section.focus(); // the focused button was removed
    };
    const noted = `Someone else, noted ${when(decoy.created_at)}${decoy.in_use ? "" : ", for another recognizer"}`;
    const row = h("div.row.between", [h("p", noted), button("Remove", remove, { icon: "trash", small: true })]);
    return h("li.card", row);
  };
  const about = `Faces more similar to these than to ${name} are not identified as ${name}. No pictures of them are stored.`;
  const list = () => [
    h("h2", counted(decoys.length, "corrected mistake")),
    h("p.hint", about),
    each("ul.stack", decoys, line),
  ];
  const show = () => fill(section, decoys.length > 0 && list());
  show();
  return section;
}

function edit(gallery, person, signal) {
  const form = personForm(person);
  const id = h("p.hint", ["Id: ", h("code", person.id)]);
  const card = saveForm([h("h2", "Details"), form.elements, id], form.changed, async (json) => {
    const path = subjectPath(gallery, person.id);
    Object.assign(person, await call("PATCH", path, { json, parse: words.parsed, signal }));
    document.querySelector("main h1").textContent = words.called(person);
    const now = edit(gallery, person, signal); // start the next edit from what is stored now
    card.replaceWith(now);
    now.querySelector("[type=submit]").focus();
    toast("Saved.");
  });
  return card;
}

function rights(gallery, person, templates, page, signal) {
  const erase = eraser(() => page, "person", words.called(person), subjectPath(gallery, person.id), {
    has: `${counted(templates.length, "photo")} and all other data of this person`,
    back: [`Back to ${gallery}`, galleryPage(gallery)],
    after: () => new Aside(gallery).forget(person.id),
    signal,
  });
  const save = () => download(`${subjectPath(gallery, person.id)}/export`, `${person.id}.json`, { signal });
  return h("section.card", [
    h("h2", "Privacy rights"),
    h("p", "Download all stored data of this person, or delete it with a receipt."),
    h("div.actions", [button("Download data", save, { icon: "docs" }), erase]),
    h("p.hint", "The download needs a key with the scope “admin”, the deletion one with “enroll”."),
  ]);
}
