import { all, call } from "../api.js";
import { rememberGallery } from "../choices.js";
import { h } from "../dom.js";
import { galleryForm } from "../gallery_form.js";
import { counted } from "../numbers.js";
import { button, dialog, empty, field, heading, linkButton, loading, problemBox, toast } from "../ui.js";
import { risk } from "../words.js";

export const title = () => "Galleries";

export function render(params, signal) {
  const make = () => button("New gallery", createGallery, { kind: "primary", icon: "plus" });
  if (params.new) queueMicrotask(() => signal.aborted || createGallery());
  return h(
    "div",
    { class: "page" },
    heading("Galleries", "A gallery is a group of people who are searched together, with its own accepted risk.", make()),
    loading(async () => {
      const found = await all("/v1/galleries", "galleries", { signal });
      if (found.length === 0)
        return empty(
          "gallery",
          "No gallery yet",
          "A gallery holds people to recognize, such as a staff, a club or a family. Each search uses one gallery. Galleries are independent.",
          make(),
        );
      return h("ul", { class: "cards" }, found.map(card));
    }),
  );
}

function card(gallery) {
  const at = `#/galleries/${encodeURIComponent(gallery.name)}`;
  const small = (element) => (element.classList.add("small"), element);
  return h(
    "li",
    { class: "card gallery-card" },
    h("h2", { class: "name" }, h("a", { href: at }, gallery.name)),
    h("p", { class: "figures" }, h("strong", {}, counted(gallery.subjects, "person", "people")), `, ${counted(gallery.templates, "photo")}`),
    h("p", { class: "hint" }, `It ${risk(gallery.risk)}.`),
    h("div", { class: "actions" }, small(linkButton("Enroll", `#/enroll?gallery=${encodeURIComponent(gallery.name)}`, { icon: "enroll" })), small(linkButton("Settings", `${at}/settings`, { kind: "quiet", icon: "edit" }))),
  );
}

function createGallery() {
  const name = h("input", { type: "text", required: true, maxLength: 64, pattern: "[A-Za-z0-9][A-Za-z0-9_.\\-]*", autocomplete: "off", spellcheck: false, placeholder: "staff" });
  const settings = galleryForm();
  const wrong = h("div", {});
  const go = h("button", { type: "submit", class: "button primary" }, "Create");
  history.replaceState(null, "", "#/galleries"); // open the dialog only once
  const box = dialog(
    "New gallery",
    h(
      "form",
      {
        class: "stack",
        onSubmit: async (event) => {
          event.preventDefault();
          go.disabled = true;
          try {
            const made = await call("POST", "/v1/galleries", { json: { name: name.value, ...settings.read() } });
            rememberGallery(made.name);
            box.close();
            toast(`Created “${made.name}”. Now enroll people.`);
            location.hash = `#/galleries/${encodeURIComponent(made.name)}`;
          } catch (error) {
            wrong.replaceChildren(problemBox(error));
            go.disabled = false;
          }
        },
      },
      field("Name", name, "Letters, digits, dots, dashes and underscores."),
      settings.elements,
      wrong,
      h("div", { class: "actions end" }, h("button", { type: "button", class: "button plain", onClick: () => box.close() }, "Cancel"), go),
    ),
  );
}
