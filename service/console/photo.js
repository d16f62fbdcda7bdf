// Photos: input (drop, paste, file, camera) and display with the detected faces.

import { EVENTS, call, patiently } from "./api.js";
import { dialog } from "./dialogs.js";
import { fill, h, icon } from "./dom.js";
import { labelWidths } from "./layout.js";
import { button } from "./ui.js";

/** Data passed between pages: a photo with the box of a face to enroll, and the photos to return to with the current
 * number `at`. */
export const DESK = { photo: null, box: null, back: null };
export const clearDesk = () => Object.assign(DESK, { photo: null, box: null, back: null });

const ACCEPT = "image/*,.heic,.heif,.avif,.tif,.tiff";

/**
 * Return a photo for display: `file`, `url`, and `width`, `height` in upright pixels. `drawable` is false if the browser
 * cannot show it upright (HEIC, TIFF, WebP with EXIF data). The sizes are then null until the service returns them.
 */
export async function open(file, signal) {
  EVENTS.dispatchEvent(new Event("work"));
  const url = URL.createObjectURL(file);
  const over = () => setTimeout(() => URL.revokeObjectURL(url), 60_000);
  if (signal.aborted) over();
  else signal.addEventListener("abort", over);
  const image = new Image();
  image.src = url;
  const drawable = !(await hasWebpExif(file)) && (await image.decode().catch(() => false)) !== false;
  const [width, height] = drawable ? [image.naturalWidth, image.naturalHeight] : [null, null];
  return { file, url, drawable, image, width, height };
}

/** Browsers ignore the orientation in the EXIF data of a WebP (RFC 9649), and the boxes are those of the upright photo. */
async function hasWebpExif(file) {
  const head = new Uint8Array(await file.slice(0, 21).arrayBuffer());
  return String.fromCharCode(...head.slice(8, 16)) === "WEBPVP8X" && (head[20] & 8) !== 0;
}

/** The body of a request with one photo. A risk goes as its form, such as `preset`. */
export function bodyOf(file, options) {
  const type = file.type.startsWith("image/") ? file.type : "application/octet-stream";
  const { risk, ...plain } = options ?? {};
  return { body: file, type, query: { ...plain, ...risk } };
}

/**
 * Set the sizes from the service, which its boxes refer to. If the browser decodes other sizes, the photo is not shown,
 * because the boxes would not fit.
 */
export function measured(photo, { width, height }) {
  if (photo.width !== width || photo.height !== height) Object.assign(photo, { width, height, drawable: false });
}

/** Request missing sizes from the service. */
export async function measure(photo, signal) {
  if (photo.width) return;
  const request = { ...bodyOf(photo.file), signal };
  const found = await patiently(() => call("POST", "/v1/detect", request), signal);
  measured(photo, found.images[0]);
}

/** A photo of one face and its surroundings. Other faces are painted over. */
export async function cropped(photo, face, others) {
  const [x0, y0, x1, y1] = face.box;
  const room = 0.8 * Math.max(x1 - x0, y1 - y0);
  const [left, top] = [x0 - room, y0 - room].map((at) => Math.max(0, Math.floor(at)));
  const [right, bottom] = [x1 + room, y1 + room].map(Math.ceil);
  const around = [left, top, Math.min(photo.width, right), Math.min(photo.height, bottom)];
  const canvas = h("canvas", { width: around[2] - left, height: around[3] - top });
  const context = canvas.getContext("2d");
  const moved = ([a, b, c, d]) => [a - left, b - top, c - a, d - b];
  context.drawImage(photo.image, -left, -top);
  context.fillStyle = "#808080";
  for (const other of others) context.fillRect(...moved(other.box));
  context.drawImage(photo.image, x0, y0, x1 - x0, y1 - y0, ...moved(face.box)); // restore overlaps with hidden faces
  return await jpegOf(canvas, photo.file.name.replace(/(\.\w+)?$/, ".jpg"));
}

/** A cropped face, `size` pixels wide, or an icon if the photo cannot be shown. */
export function thumbnail(photo, box, size = 72) {
  if (!photo.drawable) return h("span.thumb.blank", { "aria-hidden": "true" }, icon("enroll"));
  const density = Math.min(3, devicePixelRatio || 1);
  const canvas = h("canvas.thumb", { width: size * density, height: size * density, "aria-hidden": "true" });
  const side = Math.min(Math.max(box[2] - box[0], box[3] - box[1]) * 1.35, photo.width, photo.height);
  const within = (at, whole) => Math.max(0, Math.min(at, whole - side));
  const x = within((box[0] + box[2] - side) / 2, photo.width);
  const y = within((box[1] + box[3] - side) / 2, photo.height);
  const context = canvas.getContext("2d");
  context.imageSmoothingQuality = "high";
  context.drawImage(photo.image, x, y, side, side, 0, 0, canvas.width, canvas.height);
  return canvas;
}

/**
 * The photo with its faces. `marks`: {face, outcome, label, name}; `name` is written below the box. `onChoose(i)` makes each
 * box a button. `onPoint(i, on)` reports the box with pointer or focus; `point(i, on)` of the element highlights a box.
 */
export function stage(photo, marks, { onChoose, onPoint, alt } = {}) {
  const share = (value, whole) => `${(value / whole) * 100}%`;
  const all = marks.map(({ face }) => face.box);
  const widths = labelWidths(all, photo.width);
  const boxes = marks.map(({ face, outcome, label, name }, i) => {
    const [x0, y0, x1, y1] = face.box;
    const style = {
      left: share(x0, photo.width),
      top: share(y0, photo.height),
      width: share(x1 - x0, photo.width),
      height: share(y1 - y0, photo.height),
    };
    const acts = { type: "button", "aria-label": label, onClick: () => onChoose(i) };
    const props = { class: `face-box ${outcome ?? ""}`, style, ...(onChoose ? acts : { "aria-hidden": "true" }) };
    const room = { "aria-hidden": "true", style: { "--room": `${100 * widths[i]}%` } };
    const box = h(onChoose ? "button" : "div", props, [
      h("span.face-number", { "aria-hidden": "true" }, String(i + 1)),
      name && h("span.face-name", room, h("span", name)),
    ]);
    for (const name of ["pointerenter", "focus"]) box.addEventListener(name, () => onPoint?.(i, true));
    for (const name of ["pointerleave", "blur"]) box.addEventListener(name, () => onPoint?.(i, false));
    return box;
  });
  const ratio = { "aspect-ratio": `${photo.width} / ${photo.height}` };
  const picture = photo.drawable
    ? h("img", { src: photo.url, alt, width: photo.width, height: photo.height })
    : h("div.undrawable", { role: "img", "aria-label": alt, style: ratio });
  const props = { style: { "--ratio": photo.width / photo.height } };
  const unshown = "This browser cannot show this format. Kith can read it: the boxes show the faces.";
  const element = h("figure.stage", props, [
    h("div.stage-frame", [picture, boxes]),
    !photo.drawable && h("figcaption.hint", unshown),
  ]);
  element.point = (i, on) => boxes[i]?.classList.toggle("pointed", on);
  return element;
}

/**
 * Photo input: drop, paste, file dialog or camera. `onPhotos(files)` is called for each input. `signal` removes the
 * listeners. `within`: the drop target instead of the page; paste works only on the page.
 */
export function picker(
  onPhotos,
  { signal, multiple = true, within = document, title, label = title ?? "Add a photo" } = {},
) {
  const input = h("input", { type: "file", accept: ACCEPT, multiple, hidden: true });
  input.addEventListener("change", () => {
    const files = [...input.files];
    input.value = "";
    if (files.length) onPhotos(files);
  });
  const element = h("section", { class: "picker", "aria-label": label }, [
    icon("photo"),
    h("h2", title ?? (multiple ? "Drop photos here" : "Drop a photo here")),
    h("p.hint", [h("span.keyboard", "Or paste with Ctrl+V. "), "Photos are processed, not stored."]),
    h("div.actions", [
      button(multiple ? "Choose photos" : "Choose a photo", () => input.click(), { kind: "primary", icon: "upload" }),
      button("Use the camera", () => camera(onPhotos), { icon: "photo" }),
      input,
    ]),
  ]);
  const taken = (transfer) => [...(transfer?.files ?? [])].slice(0, multiple ? undefined : 1);
  const mark = (on) => element.classList.toggle("over", on);
  const listen = (name, handler) => within.addEventListener(name, handler, { signal });
  listen("dragover", (event) => {
    event.preventDefault();
    mark(event.dataTransfer?.types.includes("Files"));
  });
  listen("dragleave", (event) => within.contains(event.relatedTarget) || mark(false));
  listen("drop", (event) => {
    event.preventDefault();
    mark(false);
    const files = taken(event.dataTransfer);
    if (files.length) onPhotos(files);
  });
  if (within === document) onPaste(onPhotos, signal);
  return element;
}

/** Call `act(files)` for files that the user pastes on the page, outside dialogs. */
export function onPaste(act, signal) {
  const paste = (event) => {
    const files = [...(event.clipboardData?.files ?? [])];
    if (!files.length || document.querySelector("dialog[open]")) return;
    event.preventDefault();
    act(files);
  };
  addEventListener("paste", paste, { signal });
}

const NO_CAMERA =
  "The browser denies this page a camera: there is none, another program uses it, or you refused it. On pages without https, no browser allows it.";

/** Take a photo with the camera. */
async function camera(onPhotos) {
  const video = h("video.camera", { autoplay: true, muted: true, playsInline: true, "aria-label": "Camera preview" });
  const shutter = button("Take the photo", take, { kind: "primary", icon: "photo", disabled: true });
  const status = h("p.hint", { role: "status" }, "Allow the camera in the browser, if it asks.");
  const cancel = button("Cancel", () => box.close());
  const box = dialog("Look at the camera", video, status, h("div.actions.end", [cancel, shutter]));
  let stream = null;
  box.addEventListener("close", () => stream?.getTracks().forEach((track) => track.stop()));
  try {
    stream = await navigator.mediaDevices.getUserMedia({ video: { facingMode: "user", width: { ideal: 1920 } } });
  } catch {
    return fill(status, NO_CAMERA);
  }
  if (!box.open) return stream.getTracks().forEach((track) => track.stop());
  video.srcObject = stream;
  await video.play();
  fill(status, "Face the light. The photo is not stored.");
  shutter.disabled = false;
  shutter.focus();

  async function take() {
    const canvas = h("canvas", { width: video.videoWidth, height: video.videoHeight });
    canvas.getContext("2d").drawImage(video, 0, 0);
    const file = await jpegOf(canvas, "camera.jpg");
    if (!box.open) return; // the user canceled
    box.close();
    onPhotos([file]);
  }
}

async function jpegOf(canvas, name) {
  const blob = await new Promise((resolve) => canvas.toBlob(resolve, "image/jpeg", 0.95));
  return new File([blob], name, { type: "image/jpeg" });
}
