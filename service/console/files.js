// Files that the service makes, saved by the browser: fetched with the key, which a link could not send.

import { send } from "./api.js";
import { h } from "./dom.js";

/** Save what a GET answers as a file called `name`. It is held in memory until it is whole. */
export async function download(path, name, options) {
  const response = await send("GET", path, options);
  save(await response.blob(), name);
}

export function save(blob, name) {
  const url = URL.createObjectURL(blob);
  h("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 60_000);
}
