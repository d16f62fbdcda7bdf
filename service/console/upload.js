// Upload of a large file with progress, which `fetch` does not report.

import { Problem, key, told, unreachable, waylaid } from "./api.js";
import { fill, h } from "./dom.js";
import { bytes } from "./numbers.js";
import { address } from "./store.js";

const TYPES = {
  zip: "application/zip",
  tar: "application/x-tar",
  gz: "application/gzip",
  tgz: "application/gzip",
  zst: "application/zstd",
};
export const ARCHIVES = ".zip,.tar,.gz,.tgz,.zst";

/** The media type of an archive, by the suffix of its name; undefined for other files. */
export const archiveType = ({ name }) => TYPES[name.split(".").at(-1).toLowerCase()];

/** POST `file`, and return the JSON of the answer. `onProgress(share)`: uploaded share. Throws Problem, or AbortError by
 * `signal`. */
function upload(path, file, { query = {}, type, onProgress, signal }) {
  const url = address(path);
  for (const [name, value] of Object.entries(query)) url.searchParams.set(name, value);
  return new Promise((resolve, reject) => {
    const request = new XMLHttpRequest();
    request.open("POST", url);
    request.responseType = "json";
    request.setRequestHeader("Content-Type", type);
    if (key()) request.setRequestHeader("Authorization", `Bearer ${key()}`);
    request.upload.addEventListener("progress", ({ loaded, total }) => onProgress(total > 0 ? loaded / total : 0));
    request.addEventListener("load", () => {
      if (request.response === null) return reject(waylaid(request.status)); // no JSON
      if (request.status < 300) return resolve(request.response);
      reject(told(new Problem(request.status, request.response)));
    });
    request.addEventListener("error", () => reject(unreachable()));
    request.addEventListener("abort", () => reject(new DOMException("The upload was canceled.", "AbortError")));
    signal?.addEventListener("abort", () => request.abort(), { once: true });
    request.send(file);
  });
}

/** A bar and a text, hidden until `send(path, file, options)` uploads a file. `then`: what the server does when it has it. */
export function sender(then) {
  const bar = h("progress", { max: 1, "aria-label": "Upload" });
  const far = h("p.hint");
  const element = h("div.stack.tight", { role: "status", hidden: true }, [bar, far]);
  const send = async (path, file, options) => {
    const onProgress = (share) => {
      bar.value = share;
      fill(far, share < 1 ? `${bytes(share * file.size)} of ${bytes(file.size)} sent` : then);
    };
    onProgress(0);
    element.hidden = false;
    try {
      return await upload(path, file, { ...options, onProgress });
    } finally {
      element.hidden = true;
    }
  };
  return { element, send };
}
