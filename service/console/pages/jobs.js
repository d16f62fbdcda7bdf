import { h } from "../dom.js";
import { heading } from "../ui.js";

export const title = () => "Jobs";

export function render(params, signal) {
  return h("div", { class: "page" }, heading("Jobs", "Long work, and how far it is."));
}
