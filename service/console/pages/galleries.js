import { all } from "../api.js";
import { h } from "../dom.js";
import { empty, heading, loading } from "../ui.js";

export const title = () => "Galleries";

export function render(params, signal) {
  return h(
    "div",
    { class: "page" },
    heading("Galleries", "Groups of people who are searched together, each with the risk that it accepts."),
    loading(async () => {
      const found = await all("/v1/galleries", "galleries", { signal });
      if (found.length === 0)
        return empty("gallery", "No gallery yet", "A gallery holds the people you know: staff, members, a family.");
      return h(
        "ul",
        { class: "cards" },
        found.map((gallery) =>
          h(
            "li",
            { class: "card" },
            h("h2", {}, h("a", { href: `#/galleries/${encodeURIComponent(gallery.name)}` }, gallery.name)),
            h("p", {}, `${gallery.subjects} people, ${gallery.templates} templates`),
          ),
        ),
      );
    }),
  );
}
