import { h } from "../dom.js";
import { heading } from "../ui.js";

export const title = () => "Identify";

export function render(params, signal) {
  return h("div", { class: "page" }, heading("Identify", "Who is in this photo, and how sure that is."));
}
