// The albums of a gallery: photos without names, whose faces the service groups into people.

import { call, galleryPath } from "../api.js";
import { fill, h, icon } from "../dom.js";
import { bytes, counted, when } from "../numbers.js";
import { galleryHeading, watch } from "../reports.js";
import { packed } from "../tar.js";
import { button, dialog, empty, field, problemBox, waiting } from "../ui.js";
import { ARCHIVES, archiveType, upload } from "../upload.js";

const RISKS = [
  ["0.01", "Usual: about 1 wrong pair of faces in 100"],
  ["0.001", "Careful: about 1 in 1,000; some people get several groups"],
  ["0.05", "Generous: about 1 in 20; fewer groups per person"],
];

export const title = ({ gallery }) => `Albums of ${gallery}`;

export function render({ gallery }, signal) {
  const body = h("div", {}, waiting("Loading albums…"));
  let shown = "";
  let first = true;
  const look = watch(async () => {
    try {
      const { data } = await call("GET", `${galleryPath(gallery)}/albums`, { signal });
      first = false;
      if (JSON.stringify(data) !== shown) fill(body, list(gallery, data, start)); // keep unchanged links: one can be focused
      shown = JSON.stringify(data);
      return data.some((one) => one.state === "grouping");
    } catch (error) {
      if (error.name !== "AbortError" && first)
        fill(
          body,
          problemBox(error, () => look()),
        );
      throw error;
    }
  }, signal);
  const start = () => begin(gallery);
  return h(
    "div",
    { class: "page" },
    galleryHeading(
      gallery,
      "albums",
      "Photos without names: Kith finds who is in them, and you name the people.",
      button("New album", start, { kind: "primary", icon: "plus" }),
    ),
    look.note,
    body,
  );
}

function list(gallery, albums, start) {
  if (albums.length === 0)
    return empty(
      "photo",
      "No albums yet",
      "Choose photos of several people, such as a holiday or a party. Kith groups the faces. Nobody is enrolled until you say who it is.",
      button("New album", start, { kind: "primary", icon: "plus" }),
    );
  return h(
    "ul",
    { class: "cards" },
    albums.map((one) =>
      h(
        "li",
        { class: "card" },
        h(
          "h2",
          {},
          h(
            "a",
            { href: `#/galleries/${encodeURIComponent(gallery)}/albums/${one.id}` },
            `Album of ${when(one.created_at)}`,
          ),
        ),
        h(
          "p",
          {},
          one.state === "ready"
            ? `${counted(one.photo_count, "photo")}, ${counted(one.group_count, "group")}, ${counted(one.single_count, "single face")}`
            : h("span", { class: "outcome unknown" }, icon("jobs"), "finding faces"),
        ),
        h("p", { class: "hint" }, `Is deleted ${when(one.expires_at)}.`),
      ),
    ),
  );
}

/** Ask for photos or an archive, and send them. */
function begin(gallery) {
  const leaving = new AbortController();
  const files = h("input", {
    type: "file",
    multiple: true,
    accept: `image/*,.heic,.heif,.avif,${ARCHIVES}`,
    required: true,
  });
  const risk = h(
    "select",
    {},
    RISKS.map(([value, told]) => h("option", { value }, told)),
  );
  const told = h("div", { role: "status" });
  const bar = h("progress", { max: 1, value: 0, hidden: true, "aria-label": "Upload" });
  const submit = h("button", { type: "submit", class: "button primary" }, "Start");
  const send = async (event) => {
    event.preventDefault();
    submit.disabled = true;
    bar.hidden = false;
    const [only] = files.files;
    const type = files.files.length === 1 ? archiveType(only) : undefined;
    const archive = type ? only : packed(files.files);
    const onProgress = (share) => {
      bar.value = share;
      fill(
        told,
        h(
          "p",
          { class: "hint" },
          share < 1 ? `${bytes(share * archive.size)} of ${bytes(archive.size)} sent` : "Sent.",
        ),
      );
    };
    try {
      const query = { risk: risk.value };
      const job = await upload(`${galleryPath(gallery)}/albums`, archive, {
        query,
        type: type ?? "application/x-tar",
        onProgress,
        signal: leaving.signal,
      });
      box.close();
      location.hash = `#/galleries/${encodeURIComponent(gallery)}/albums/${job.id}`;
    } catch (error) {
      bar.hidden = true;
      if (error.name !== "AbortError") fill(told, problemBox(error));
    } finally {
      submit.disabled = false;
    }
  };
  const box = dialog(
    "New album",
    h(
      "form",
      { onSubmit: send },
      field("Photos", files, "Many photos, or one zip, tar, tar.gz or tar.zst of them. At most 20,000."),
      field(
        "How careful",
        risk,
        "A careful album puts fewer strangers into one group, and splits more people into several.",
      ),
      bar,
      told,
      h(
        "div",
        { class: "actions end" },
        h("button", { type: "button", class: "button plain", onClick: () => box.close() }, "Cancel"),
        submit,
      ),
    ),
  );
  box.addEventListener("close", () => leaving.abort());
}
