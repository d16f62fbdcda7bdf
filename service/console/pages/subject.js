import { h } from "../dom.js";
import { heading } from "../ui.js";

export const title = () => "Person";

export function render(params, signal) {
  return h("div", { class: "page" }, heading("Person", "What is held about one person."));
}
