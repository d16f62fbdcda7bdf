// Downloads of files from the service. They need the API key, which a link cannot send.

import { send } from "./api.js";
import { h } from "./dom.js";

/** Download `path` as a file called `name`. The content is held in memory. */
export async function download(path, name, options) {
  const response = await send("GET", path, options);
  const url = URL.createObjectURL(await response.blob());
  h("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 60_000);
}
