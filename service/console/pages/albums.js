// The albums of a gallery: photos without names, whose faces the service groups into people.

import { call, galleryPage, galleryPath } from "../api.js";
import { ask } from "../dialogs.js";
import { h } from "../dom.js";
import { counted, when } from "../numbers.js";
import { galleryHeading, renewedList } from "../reports.js";
import { packed } from "../tar.js";
import { choice, field } from "../forms.js";
import { button, empty, outcome } from "../ui.js";
import { ARCHIVES, archiveType, sender } from "../upload.js";

const RISKS = [
  ["0.01", "Usual: about 1 wrong pair of faces in 100"],
  ["0.001", "Careful: about 1 in 1,000; some people get several groups"],
  ["0.05", "Generous: about 1 in 20; fewer groups per person"],
];

const LEAD = "Photos without names: Kith finds who is in them, and you name the people.";
const NONE =
  "Choose photos of several people, such as a holiday or a party. No one is enrolled until you say who it is.";
const make = (start) => button("New album", start, { kind: "primary", icon: "plus" });

export const title = ({ gallery }) => `Albums of ${gallery}`;

export function render({ gallery }, signal) {
  const start = () => begin(gallery);
  const load = async () => (await call("GET", `${galleryPath(gallery)}/albums`, { signal })).data;
  const nothing = () => empty("photo", "No albums yet", NONE, make(start));
  const list = renewedList("ul.cards", load, (one) => card(gallery, one), nothing, signal, { busy: isGrouping });
  return h("div.page", [galleryHeading(gallery, "albums", LEAD, make(start)), list.elements]);
}

const isGrouping = ({ state }) => state === "grouping";

const card = (gallery, one) =>
  h("li.card", [
    h("h2", h("a", { href: galleryPage(gallery, `/albums/${one.id}`) }, `Album of ${when(one.created_at)}`)),
    h("p", isGrouping(one) ? outcome("unknown", "jobs", "finding faces") : content(one)),
    h("p.hint", `Is deleted ${when(one.expires_at)}.`),
  ]);

const content = ({ photo_count: photos, group_count: groups, single_count: singles }) =>
  `${counted(photos, "photo")}, ${counted(groups, "group")}, ${counted(singles, "single face")}`;

/** Ask for photos or an archive, and send them. */
function begin(gallery) {
  const accept = `image/*,.heic,.heif,.avif,${ARCHIVES}`;
  const files = h("input", { type: "file", multiple: true, accept, required: true });
  const risk = choice(RISKS);
  const upload = sender("Sent.");
  const elements = [
    field("Photos", files, "Many photos, or one zip, tar, tar.gz or tar.zst of them. At most 20,000."),
    field("How careful", risk, "A careful album joins fewer strangers, and splits more people into several groups."),
    upload.element,
  ];
  ask("New album", "Start", elements, async (signal) => {
    const [only] = files.files;
    const type = files.files.length === 1 ? archiveType(only) : undefined;
    const options = { query: { risk: risk.value }, type: type ?? "application/x-tar", signal };
    const job = await upload.send(`${galleryPath(gallery)}/albums`, type ? only : packed(files.files), options);
    return () => (location.hash = galleryPage(gallery, `/albums/${job.id}`));
  });
}
