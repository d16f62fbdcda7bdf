// Fields that several pages share: gallery, strictness and enrolled person.

import { all, call, galleryPath, newest, subjectPath } from "./api.js";
import { fill, h } from "./dom.js";
import { counted } from "./numbers.js";
import { read, write } from "./store.js";
import { afterTyping, choice, field, textInput } from "./forms.js";
import { empty, heading, linkButton, loading, tell, unique } from "./ui.js";
import { called, unfound } from "./words.js";

const GALLERY = "kith-gallery";
const rememberedGallery = () => read("localStorage", GALLERY);
export const rememberGallery = (name) => write("localStorage", GALLERY, name);

/** The galleries of the key; null if it may not list them. Throws Problem. */
export async function galleries(signal) {
  try {
    return await all("/v1/galleries", { signal });
  } catch (error) {
    if (error.code === "forbidden") return null;
    throw error;
  }
}

/** A page with `desk(known, params, signal)`, or with a hint to create a gallery if there is none. */
export function galleryDesk(title, lead, desk, params, signal) {
  const about = "A gallery holds the people to recognize, such as a staff, a club or a family.";
  const make = linkButton("Create a gallery", "#/galleries?new=1", { kind: "primary", icon: "plus" });
  const content = async () => {
    const known = await galleries(signal);
    return known?.length === 0 ? empty("gallery", "Create a gallery first", about, make) : desk(known, params, signal);
  };
  return h("div.page", [heading(title, lead), loading(content, "Loading galleries…")]);
}

/** A gallery field: a list, or a text field if the key may not list galleries (`known` null). The element has `value`. */
export function galleryField(known, onChange, { chosen } = {}) {
  const wanted = chosen ?? rememberedGallery();
  const change = (name) => {
    rememberGallery(name);
    onChange?.(name);
  };
  const own = (element, input) => Object.defineProperty(element, "value", { get: () => input.value.trim() });
  if (known === null) {
    const input = textInput({ value: wanted ?? "", required: true });
    input.addEventListener("change", () => input.value.trim() && change(input.value.trim()));
    return own(field("Gallery", input, "This key cannot list galleries. Type the name of your gallery."), input);
  }
  const told = (one) => `${one.name} (${counted(one.subject_count, "person", "people")})`;
  const pairs = known.map((one) => [one.name, told(one)]);
  const first = known.find((one) => one.name === wanted) ?? known.find((one) => one.subject_count > 0) ?? known[0];
  const select = choice(pairs, { value: first?.name ?? "", onChange: () => change(select.value) });
  return own(field("Gallery", select), select);
}

/** A strictness field with `value` and, in words, `told`. `presets`: their names and labels. `own`: the gallery's risk in
 * words, null if there is none. `chosen`: the preset that the user chose before. */
export function riskField(onChange, presets, { own, hint, chosen = own === null ? "standard" : "" }) {
  const options = own === null ? presets : [["", `Gallery setting: ${own}`], ...presets];
  const select = choice(options, { value: chosen, onChange });
  return Object.defineProperties(field("How strict", select, hint), {
    value: { get: () => (select.value ? { preset: select.value } : undefined) },
    told: { get: () => select.selectedOptions[0]?.textContent ?? "" },
  });
}

const PROPOSED = 100; // people that the field lists at once

/**
 * A field to find an enrolled person by name or id; the service searches while the user types. `find()` resolves to the
 * subject, or to null with a reason in `unfound`. `load(gallery)` rejects with AbortError when another gallery is loaded.
 */
export function personField(label, signal, { onPick } = {}) {
  const list = h("datalist", { id: unique("people") });
  const input = textInput();
  input.setAttribute("list", list.id);
  const element = field(label, input, "Type a name or an id.");
  element.append(list);
  let gallery = null;
  let people = [];
  const turn = newest(signal);
  const shown = (one) => (one.name ? `${one.name} (${one.id})` : one.id);

  /** The people who match the text, at most PROPOSED; none if the text cannot be searched for. */
  async function search(text, until) {
    const options = { query: { limit: PROPOSED, q: text || null }, signal: until, most: PROPOSED };
    return await all(`${galleryPath(gallery)}/subjects`, options).catch((error) => {
      if (error.code !== "forbidden" && error.code !== "invalid_request") throw error;
      return [];
    });
  }

  async function propose(text) {
    people = await turn((until) => search(text, until));
    fill(
      list,
      people.map((one) => h("option", { value: shown(one) })),
    );
  }

  element.load = async (name) => {
    gallery = name;
    people = [];
    fill(list);
    await propose("");
  };
  element.find = async () => {
    const text = input.value.trim();
    element.unfound = unfound(0);
    if (!text || !gallery) return null;
    const listed = people.find((one) => shown(one) === text || one.id === text);
    if (listed) return listed;
    const inBrackets = /\(([^()]+)\)$/.exec(text)?.[1];
    const matches = (await search(text, signal)).filter((one) => called(one).toLowerCase() === text.toLowerCase());
    if (matches.length === 1) return matches[0];
    element.unfound = unfound(matches.length);
    try {
      return await call("GET", subjectPath(gallery, inBrackets ?? text), { signal });
    } catch (error) {
      if (error.code === "subject_not_found" || error.code === "invalid_request") return null;
      if (error.code === "forbidden") return { id: inBrackets ?? text, name: null };
      throw error;
    }
  };
  element.set = (one) => (input.value = shown(one));
  element.input = input;
  input.addEventListener("change", () => onPick?.());
  const typed = afterTyping(() => {
    const text = input.value.trim();
    if (!gallery || people.some((one) => shown(one) === text)) return; // picked from the list
    propose(text).catch((error) => error.name === "AbortError" || tell(error));
  }, signal);
  input.addEventListener("input", typed);
  return element;
}
