// What several pages let a person choose: a gallery, how strict to be, somebody who is enrolled.

import { all, call, galleryPath, subjectPath } from "./api.js";
import { fill, h } from "./dom.js";
import { counted } from "./numbers.js";
import { read, write } from "./store.js";
import { field, unique } from "./ui.js";
import { PRESETS, called, idRefusal, riskBriefly, unfound } from "./words.js";

const GALLERY = "kith-gallery";
const RISK = "kith-risk";
export const rememberedGallery = () => read("localStorage", GALLERY);
export const rememberGallery = (name) => write("localStorage", GALLERY, name);

/**
 * The galleries that the key is for; null where it may not list them. Throws Problem.
 */
export async function galleries(signal) {
  try {
    return await all("/v1/galleries", "galleries", { signal });
  } catch (error) {
    if (error.code === "forbidden") return null;
    throw error;
  }
}

/**
 * A field to choose a gallery: a list, or a text field where the key may not see the list (`known` null).
 * `onChange(name)`; the element has `value`.
 */
export function galleryField(known, onChange, { label = "Gallery", chosen } = {}) {
  const wanted = chosen ?? rememberedGallery();
  const change = (name) => {
    rememberGallery(name);
    onChange?.(name);
  };
  if (known === null) {
    const input = h("input", { type: "text", value: wanted ?? "", autocomplete: "off", spellcheck: false, required: true });
    input.addEventListener("change", () => input.value.trim() && change(input.value.trim()));
    const element = field(label, input, "This key may not list the galleries. Type the name of yours.");
    Object.defineProperty(element, "value", { get: () => input.value.trim() });
    return element;
  }
  const select = h("select", {}, known.map((one) => h("option", { value: one.name }, `${one.name} (${counted(one.subjects, "person", "people")})`)));
  select.value = known.some((one) => one.name === wanted) ? wanted : ((known.find((one) => one.subjects > 0) ?? known[0])?.name ?? "");
  select.addEventListener("change", () => change(select.value));
  const element = field(label, select);
  Object.defineProperty(element, "value", { get: () => select.value });
  return element;
}

/** How strict a search is. `own`: the gallery's risk, in words; null where there is none to fall back on. `pairs`: the
 * presets in other words, of a comparison: what is chosen for searches is not taken for it. `chosen`: the preset that somebody
 * chose already. */
export function riskField(onChange, { own = null, label = "How strict", hint, pairs, chosen } = {}) {
  const select = h(
    "select",
    {},
    own !== null && h("option", { value: "" }, `As the gallery says: ${own}`),
    (pairs ?? PRESETS.map(([value, name, words]) => [value, `${name}: ${words}`])).map(([value, words]) => h("option", { value }, words)),
  );
  const remembered = pairs ? null : read("sessionStorage", RISK);
  select.value = chosen ?? (own === null ? "standard" : (remembered ?? ""));
  select.addEventListener("change", () => {
    if (own !== null && !pairs) write("sessionStorage", RISK, select.value);
    onChange?.();
  });
  const element = field(label, select, hint);
  Object.defineProperty(element, "value", { get: () => (select.value ? { preset: select.value } : undefined) });
  return element;
}

/** A gallery's own risk for `riskField`. */
export const ownRisk = (gallery) => (gallery ? riskBriefly(gallery.risk) : "its own risk");

const MOST = 2000;

/**
 * A field to find somebody who is enrolled, by name or id. The element has `find()`, which resolves to the subject or
 * null (then `unfound` says why), and `load(gallery)`, which rejects with AbortError once another gallery is loaded.
 */
export function personField(label, signal, { onPick } = {}) {
  const list = h("datalist", { id: unique("people") });
  const input = h("input", { type: "text", autocomplete: "off", spellcheck: false });
  input.setAttribute("list", list.id);
  const element = field(label, input, "Begin to type a name or an id.");
  element.append(list);
  let gallery = null;
  let people = [];
  let loading = null;
  const shown = (one) => (one.name ? `${one.name} (${one.id})` : one.id);
  element.load = async (name) => {
    loading?.abort();
    const { signal: until } = (loading = new AbortController());
    gallery = name;
    people = [];
    fill(list);
    const options = { query: { limit: 1000 }, signal: AbortSignal.any([signal, until]), most: MOST };
    const listed = await all(`${galleryPath(name)}/subjects`, "subjects", options).catch((error) => {
      if (error.code !== "forbidden") throw error;
      return [];
    });
    until.throwIfAborted();
    people = listed;
    fill(list, people.map((one) => h("option", { value: shown(one) })));
  };
  element.find = async () => {
    const text = input.value.trim();
    element.unfound = unfound(0, null);
    if (!text || !gallery) return null;
    const named = people.find((one) => shown(one) === text || one.id === text);
    if (named) return named;
    const inBrackets = /\(([^()]+)\)$/.exec(text)?.[1];
    const alike = people.filter((one) => called(one).toLowerCase() === text.toLowerCase());
    if (alike.length === 1) return alike[0];
    element.unfound = unfound(alike.length, people.length < MOST ? null : people.length);
    if (idRefusal(inBrackets ?? text)) return null;
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
  return element;
}
