import { call, newest, patiently } from "../api.js";
import { galleries, galleryField, personField, riskField } from "../choices.js";
import { each, fill, h } from "../dom.js";
import { many } from "../numbers.js";
import { onPaste, open, picker } from "../photo.js";
import { ticked } from "../forms.js";
import { button, folded, heading, loading, problemBox, tell, unique, waiting } from "../ui.js";
import * as words from "../words.js";
import { badge, bare, meter, numbers } from "./identify.js";

export const title = () => "Compare";

const PAIRS = words.PRESETS.map(([value, name, , rate]) => [
  value,
  `${name}: 1 wrong match per ${many(1 / rate)} pairs`,
]);

export function render(params, signal) {
  return h("div.page", [
    heading("Compare", "Check whether two photos show the same person, or whether a photo shows an enrolled person."),
    loading(async () => desk(await galleries(signal), params, signal)),
  ]);
}

function desk(known, params, signal) {
  const answer = h("div.answer");
  const live = h("p.unseen", { role: "status" });
  const risks = h("div");
  const sides = ["First", "Second"].map((name, i) =>
    side(name, known, signal, () => {
      if (sides[i].gallery() !== null) sides[1 - i].choosePhoto(); // one side may be a person: hygiene compares people
      compare();
    }),
  );
  let strictness;
  let chosen; // the user's choice of strictness, kept for other sides
  let own;
  const turn = newest(signal);
  strict();

  /** Offer the risk of the gallery for comparisons with one enrolled person, if it is a risk per comparison. */
  function strict() {
    const gallery = sides.map((one) => one.gallery()).find((one) => one !== null);
    const now = gallery === undefined ? null : riskOf(known, gallery);
    if (strictness && now === own) return;
    own = now;
    const hint = "Wrong matches per pair of different people.";
    fill(risks, (strictness = riskField(choose, PAIRS, { own, hint, chosen })));
  }

  function choose() {
    chosen = strictness.value?.preset;
    compare();
  }

  /** Compare when both sides are complete, and after each change. */
  async function compare() {
    strict();
    const complete = sides.every((one) => one.given());
    fill(answer, complete && h("div.card", waiting("Comparing…")));
    const form = new FormData();
    const options = { ...(strictness.value && { risk: strictness.value }) };
    if (complete) sides.forEach((one, i) => one.put(form, options, "ab"[i]));
    form.append("request", JSON.stringify(options));
    const ask = (until) => patiently(() => call("POST", "/v1/verify", { body: form, signal: until }), until);
    try {
      const found = await turn(async (until) => complete && (await ask(until)));
      if (!found) return;
      sides.forEach((one, i) => one.show(found["ab"[i]]));
      const said = words.pair(found, sides[0].called(), sides[1].called());
      fill(answer, result(found, said)).scrollIntoView({ block: "nearest" });
      live.textContent = `${said.title}. ${said.text}`;
    } catch (error) {
      if (error.name === "AbortError") return;
      fill(answer, problemBox(error, words.mayPass(error) && compare));
    }
  }

  onPaste((files) => {
    const free = sides.filter((one) => !one.given());
    files.slice(0, 2).forEach((file, i) => (free[i] ?? sides[i]).take([file]));
  }, signal);
  return h("div.stack.wide", [
    each("div.pair-of-sides", sides, (one) => one.element),
    live,
    answer,
    h("div.choices", risks),
  ]);
}

/** The gallery's risk per comparison in words; null if its risk is per search. `known`: the galleries, or null if the key
 * cannot list them. */
function riskOf(known, name) {
  if (known === null) return "its risk per comparison, if it has one";
  const risk = known.find((one) => one.name === name)?.risk;
  return risk && risk.fpir === undefined ? words.riskInWords(risk) : null;
}

/** One side: a photo or an enrolled person. */
function side(name, known, signal, onChange) {
  let photo = null;
  let person = null;
  const place = h("div.stack");
  const group = unique("side");
  const asPhoto = h("input", { type: "radio", name: group, checked: true });
  const asPerson = h("input", { type: "radio", name: group });
  const find = personField("Person", signal, { onPick: look });
  const turn = newest(signal);
  const gallery = galleryField(known, (chosen) => {
    person = null;
    onChange();
    turn(() => find.load(chosen)).then(look, tell); // cancels the lookup in the previous gallery
  });
  const told = h("p.hint", { role: "status" });
  const element = h("fieldset.card.stack");
  const label = `The ${name.toLowerCase()} photo`;
  const pick = picker(take, { signal, multiple: false, within: element, title: "Drop a photo here", label });

  async function take([file]) {
    photo = file ? await open(file, signal) : null;
    asPhoto.checked = true;
    show();
    onChange();
  }

  async function look() {
    try {
      person = await turn(find.find);
      told.textContent = person || !find.input.value ? "" : find.unfound;
      onChange();
    } catch (error) {
      tell(error);
    }
  }

  function show(seen) {
    if (asPerson.checked) return fill(place, gallery, find, told);
    if (!photo) return fill(place, pick);
    const marks = seen?.face ? [{ face: seen.face, outcome: "chosen" }] : [];
    const another = button("Another photo", () => take([]), { icon: "close", kind: "quiet" });
    const largest = seen?.face_count > 1 && `Kith compared the largest of ${seen.face_count} faces.`;
    fill(place, bare(photo, marks), largest && h("p.hint", largest), h("div.actions", another));
  }
  for (const one of [asPhoto, asPerson])
    one.addEventListener("change", () => {
      if (asPerson.checked && gallery.value) find.load(gallery.value).catch(tell);
      show();
      onChange();
    });
  show();
  fill(
    element,
    h("legend.side-name", name),
    known?.length !== 0 && h("div.row", [ticked(asPhoto, "A photo"), ticked(asPerson, "An enrolled person")]),
    place,
  );
  return {
    take,
    element,
    choosePhoto: () => asPhoto.checked || ((asPhoto.checked = true), show()),
    /** The gallery of the person on this side; null for a photo. */
    gallery: () => (asPerson.checked ? gallery.value : null),
    given: () => (asPerson.checked ? person !== null : photo !== null),
    called: () => (asPerson.checked ? `the enrollment of ${words.called(person)}` : `the ${name.toLowerCase()} photo`),
    put(form, options, letter) {
      if (asPerson.checked) options[letter] = { subject: { gallery: gallery.value, subject: person.id } };
      else form.append(letter, photo.file);
    },
    show: (seen) => asPhoto.checked && show(seen),
  };
}

function result(found, said) {
  const face = { a: found.a.face, b: found.b.face };
  const why = (one) => {
    const [letter, name] = one.includes(": ") ? one.split(": ") : [null, one];
    return h("li", [letter && `${letter === "a" ? "First" : "Second"}: `, words.reason(name, face[letter])]);
  };
  const reasons = found.reasons.filter((one) => !one.endsWith("no_face"));
  const measured = () => [
    meter(found),
    folded("Details", numbers(found, "False-match", found.false_match_probability, [["Model", found.model]])),
  ];
  return h("section.card.verdict", { "aria-label": "The answer" }, [
    badge(found.outcome),
    h("h2", said.title),
    h("p", said.text),
    reasons.length > 0 && each("ul.bullets", reasons, why),
    found.similarity !== undefined && measured(),
  ]);
}
