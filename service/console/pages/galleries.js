import { all, call, enrollPage, galleryPage, galleryPath } from "../api.js";
import { rememberGallery } from "../choices.js";
import { ask } from "../dialogs.js";
import { fill, h } from "../dom.js";
import { galleryForm } from "../gallery_form.js";
import { counted } from "../numbers.js";
import { renewedList } from "../reports.js";
import { Pictures, whenVisible } from "../stored.js";
import { field, textInput } from "../forms.js";
import { button, empty, heading, linkButton, toast } from "../ui.js";
import { called, riskInWords } from "../words.js";

const NAMED = 3; // people on a card

const LEAD = "A gallery is a group of people who are searched together, with its own accepted risk.";
const NONE = "A gallery holds people to recognize, such as a staff, a club or a family. Each search uses one gallery.";

export const title = () => "Galleries";

export function render(params, signal) {
  const make = () => button("New gallery", createGallery, { kind: "primary", icon: "plus" });
  const load = () => all("/v1/galleries", { signal });
  const nothing = () => empty("gallery", "No gallery yet", NONE, make());
  const list = renewedList("ul.cards", load, (one) => card(one, signal), nothing, signal, { name: "name" });
  if (params.new) queueMicrotask(() => signal.aborted || createGallery());
  return h("div.page", [heading("Galleries", LEAD, make()), list.elements]);
}

/** The first people by name, with their pictures if the gallery keeps them, when the card comes into view. */
function named({ name: gallery, subject_count: subjects, keep_crops: keeps }, signal) {
  const place = h("ul.stack.tight.named");
  const show = async () => {
    const path = `${galleryPath(gallery)}/subjects`;
    const page = await call("GET", path, { query: { limit: NAMED }, signal }).catch(() => null); // the key may not read them
    const pictures = new Pictures(gallery, signal);
    const line = (one) => h("li.person-cell", [keeps && pictures.of({ subject: one.id }, ""), h("span", called(one))]);
    const more = subjects - (page?.data.length ?? subjects);
    fill(place, page?.data.map(line), more > 0 && h("li.hint", `and ${counted(more, "other")}`));
  };
  if (subjects > 0) whenVisible(place, signal, show);
  return place;
}

function card(gallery, signal) {
  const at = galleryPage(gallery.name);
  const photos = counted(gallery.template_count, "photo");
  return h("li.card.gallery-card", [
    h("h2.name", h("a", { href: at }, gallery.name)),
    h("p.figures", [h("strong", counted(gallery.subject_count, "person", "people")), `, ${photos}`]),
    named(gallery, signal),
    h("p.hint", `Risk: ${riskInWords(gallery.risk)}.`),
    h("div.actions", [
      linkButton("Enroll", enrollPage(gallery.name), { icon: "enroll", small: true }),
      linkButton("Settings", `${at}/settings`, { kind: "quiet", icon: "edit", small: true }),
    ]),
  ]);
}

function createGallery() {
  const pattern = "[A-Za-z0-9][A-Za-z0-9_.\\-]*";
  const name = textInput({ required: true, maxLength: 64, pattern, placeholder: "staff" });
  const settings = galleryForm();
  history.replaceState(null, "", "#/galleries"); // open the dialog only once
  const elements = [field("Name", name, "Letters, digits, dots, dashes and underscores."), settings.elements];
  ask("New gallery", "Create", elements, async () => {
    const made = await call("POST", "/v1/galleries", { json: { name: name.value, ...settings.read() } });
    rememberGallery(made.name);
    toast(`Created “${made.name}”. Now enroll people.`);
    return () => (location.hash = galleryPage(made.name));
  });
}
