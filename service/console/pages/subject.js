import { all, call, decoysPath, galleryPath, subjectPath, templatePath } from "../api.js";
import { Aside } from "../aside.js";
import { personField } from "../choices.js";
import { fill, h, icon } from "../dom.js";
import { download } from "../files.js";
import { counted, when } from "../numbers.js";
import { personForm } from "../person_form.js";
import { receipt } from "../receipt.js";
import { Pictures } from "../stored.js";
import { button, confirmed, dialog, empty, heading, linkButton, loading, problemBox, tell, toast } from "../ui.js";
import * as words from "../words.js";

export const title = ({ subject }) => subject;

export function render({ gallery, subject }, signal) {
  const page = h("div", { class: "page" });
  const at = `#/galleries/${encodeURIComponent(gallery)}`;
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
    h("nav", { "aria-label": "Breadcrumb" }, h("a", { class: "back", href: at }, icon("back"), gallery)),
    content,
  );
}

function view({ gallery, person, templates, decoys, keeps }, page, signal) {
  const add = `#/enroll?gallery=${encodeURIComponent(gallery)}&subject=${encodeURIComponent(person.id)}`;
  return h(
    "div",
    { class: "stack wide" },
    heading(
      words.called(person),
      `In “${gallery}” since ${when(person.created_at)}.`,
      linkButton("Add photos", add, { kind: "primary", icon: "plus" }),
    ),
    h(
      "div",
      { class: "columns" },
      h(
        "div",
        { class: "stack" },
        photos({ gallery, person, templates, keeps }, add, signal),
        mistakes(gallery, person, decoys),
      ),
      h("div", { class: "stack" }, edit(gallery, person, signal), rights(gallery, person, templates, page, signal)),
    ),
  );
}

/** The photos of the person. Only quality values are stored, and small pictures if the gallery keeps them. */
function photos({ gallery, person, templates, keeps }, add, signal) {
  const section = h("section", { class: "stack", "aria-label": "Photos", tabindex: "-1" });
  const pictures = new Pictures(gallery, signal);
  const none = () =>
    empty(
      "photo",
      "No photos yet",
      "Without a photo, searches cannot find this person.",
      linkButton("Add photos", add, { kind: "primary", icon: "plus" }),
    );
  const show = () =>
    fill(
      section,
      templates.length === 0
        ? none()
        : [
            headline(),
            h(
              "ul",
              { class: "stack" },
              templates.map((one) => h("li", { class: "card" }, line(one))),
            ),
          ],
    );
  const headline = () => [
    h("h2", {}, counted(templates.length, "photo")),
    !keeps &&
      h(
        "p",
        { class: "hint" },
        "To see pictures here, turn on “Keep a small picture of each enrolled face” in the gallery's settings, then add photos again.",
      ),
  ];
  const gone = (template) => {
    templates.splice(templates.indexOf(template), 1);
    show();
    section.focus(); // the focused button was removed
  };
  const small = (element) => (element.classList.add("small"), element);

  function line(template) {
    const { quality } = template;
    return h(
      "div",
      { class: "photo-row" },
      keeps && quality
        ? pictures.photo(person.id, template.id, `Stored picture of ${words.called(person)}`)
        : h("span", { class: "thumb blank", "aria-hidden": "true" }, icon(quality ? "enroll" : "hygiene")),
      h(
        "div",
        { class: "stack tight" },
        h(
          "p",
          {},
          h("strong", {}, quality ? `Photo, ${words.quality(quality.score)} quality` : "Embedding"),
          `, added ${when(template.created_at)}`,
        ),
        quality && bar(quality.score),
        h(
          "div",
          { class: "actions" },
          small(button("Move", () => move(template), { icon: "move" })),
          small(button("Delete", () => remove(template), { kind: "danger", icon: "trash" })),
        ),
        quality &&
          h(
            "details",
            { class: "details" },
            h("summary", {}, "Details"),
            h(
              "dl",
              { class: "facts" },
              [
                ...words.qualities(quality),
                ["Quality score", quality.score.toFixed(2)],
                ["Template", h("code", {}, template.id.slice(0, 12))],
              ].map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))),
            ),
          ),
      ),
    );
  }

  async function remove(template) {
    const last = templates.length === 1;
    const sure = await confirmed({
      title: "Delete this photo?",
      text: last
        ? `It is the only photo. Searches cannot find ${words.called(person)} until you add another one.`
        : "This cannot be undone.",
      yes: "Delete",
    });
    if (!sure) return;
    const answer = await call("DELETE", templatePath(gallery, person.id, template.id));
    gone(template);
    toast(`Deleted. Receipt ${answer.receipt.id.slice(0, 8)}….`);
  }

  async function move(template) {
    const to = personField("Person", signal);
    await to.load(gallery).catch(tell);
    if (signal.aborted) return;
    const go = h("button", { type: "submit", class: "button primary" }, "Move");
    const wrong = h("p", { class: "refused", role: "alert" });
    const box = dialog(
      "Move this photo",
      h(
        "form",
        {
          class: "stack",
          onSubmit: async (event) => {
            event.preventDefault();
            go.disabled = true;
            try {
              const found = await to.find();
              if (!found || found.id === person.id)
                return fill(wrong, icon("warning"), found ? "The photo already belongs to this person." : to.unfound);
              await call("PATCH", templatePath(gallery, person.id, template.id), { json: { subject: found.id } });
              box.close();
              gone(template);
              toast(`Moved to ${words.called(found)}.`);
            } catch (error) {
              fill(wrong, icon("warning"), error.message);
            } finally {
              go.disabled = false;
            }
          },
        },
        to,
        wrong,
        h(
          "div",
          { class: "actions end" },
          h("button", { type: "button", class: "button plain", onClick: () => box.close() }, "Cancel"),
          go,
        ),
      ),
    );
  }
  show();
  return section;
}

/** The people who were mistaken for the person. No pictures of them are stored. */
function mistakes(gallery, person, decoys) {
  const section = h("section", { class: "stack", "aria-label": "Corrected mistakes", tabindex: "-1" });
  const line = (decoy) => {
    const remove = button(
      "Remove",
      async () => {
        await call("DELETE", `${decoysPath(gallery, person.id)}/${decoy.id}`);
        decoys.splice(decoys.indexOf(decoy), 1);
        show();
        section.focus(); // the focused button was removed
      },
      { icon: "trash" },
    );
    remove.classList.add("small");
    return h(
      "li",
      { class: "card" },
      h(
        "div",
        { class: "row between" },
        h("p", {}, `Somebody else, noted ${when(decoy.created_at)}`, !decoy.in_use && ", for another recognizer"),
        remove,
      ),
    );
  };
  const show = () =>
    fill(
      section,
      decoys.length > 0 && [
        h("h2", {}, counted(decoys.length, "corrected mistake")),
        h(
          "p",
          { class: "hint" },
          `Faces more similar to these than to ${words.called(person)} are not identified as ${words.called(person)}. No pictures of them are stored.`,
        ),
        h("ul", { class: "stack" }, decoys.map(line)),
      ],
    );
  show();
  return section;
}

const bar = (score) =>
  h(
    "div",
    { class: "meter enough slim", role: "img", "aria-label": `Quality ${score.toFixed(2)} of 1` },
    h("span", { class: "meter-fill", style: { width: `${score * 100}%` } }),
  );

function edit(gallery, person, signal) {
  const form = personForm(person);
  const go = h("button", { type: "submit", class: "button primary" }, "Save");
  return h(
    "form",
    {
      class: "card stack",
      onSubmit: async (event) => {
        event.preventDefault();
        const json = form.changed();
        if (Object.keys(json).length === 0) return toast("Nothing was changed.");
        go.disabled = true;
        const card = event.currentTarget;
        try {
          Object.assign(
            person,
            await call("PATCH", subjectPath(gallery, person.id), { json, parse: words.parsed, signal }),
          );
          document.querySelector("main h1").textContent = words.called(person);
          const now = edit(gallery, person, signal); // start the next edit from what is stored now
          card.replaceWith(now);
          now.querySelector("[type=submit]").focus();
          toast("Saved.");
        } catch (error) {
          tell(error);
        } finally {
          go.disabled = false;
        }
      },
    },
    h("h2", {}, "Details"),
    form.elements,
    h("p", { class: "hint" }, "Id: ", h("code", {}, person.id)),
    h("div", { class: "actions" }, go),
  );
}

function rights(gallery, person, templates, page, signal) {
  const remove = async () => {
    const name = words.called(person);
    const sure = await confirmed({
      title: `Delete ${name}?`,
      text: `${counted(templates.length, "photo")} and all other data of this person are deleted. This cannot be undone. A receipt lists the deleted data.`,
      yes: "Delete",
    });
    if (!sure) return;
    const gone = await call("DELETE", subjectPath(gallery, person.id));
    new Aside(gallery).forget(person.id);
    if (signal.aborted) return toast(`${name} is deleted. Receipt ${gone.receipt.id}.`);
    fill(
      page,
      heading(name),
      receipt(gone.receipt, "Deleted"),
      h(
        "div",
        { class: "actions" },
        linkButton(`Back to ${gallery}`, `#/galleries/${encodeURIComponent(gallery)}`, { kind: "primary" }),
      ),
    );
    page.querySelector("a").focus();
  };
  return h(
    "section",
    { class: "card" },
    h("h2", {}, "Privacy rights"),
    h("p", {}, "Download all stored data of this person, or delete it with a receipt."),
    h(
      "div",
      { class: "actions" },
      button(
        "Download data",
        () => download(`${subjectPath(gallery, person.id)}/export`, `${person.id}.json`, { signal }),
        { icon: "docs" },
      ),
      button("Delete the person", remove, { kind: "danger", icon: "trash" }),
    ),
    h("p", { class: "hint" }, "The download needs a key with the scope “admin”, the deletion one with “enroll”."),
  );
}
