// Recognizers that the service has loaded, their devices, and the recognizer of each gallery.

import { call, galleryPage } from "../api.js";
import { galleries } from "../choices.js";
import { each, h } from "../dom.js";
import { whole } from "../numbers.js";
import { settingsHeading } from "../reports.js";
import { linkButton, loading, outcome, table } from "../ui.js";

export const title = () => "Recognizers";

export function render(params, signal) {
  return h("div.page", [
    settingsHeading(
      "recognizers",
      "The recognizers of this service, the devices that run them, and the galleries that use them.",
    ),
    loading(async () => {
      const { models: served } = await call("GET", "/v1/models", { signal });
      return [models(served), loading(() => users(served, signal), "Loading galleries…")];
    }, "Loading recognizers…"),
  ]);
}

const UNCALIBRATED =
  "This model has no calibration, so you can choose similarities but no risks. Run “kith models calibrate PACK --photos FOLDER”.";

const models = (served) =>
  h("section.stack", [h("h2", "Recognizers and devices"), each("ul.cards.models", served, card)]);

function card({ display_name: name, calibrated, recognizer, dimension, ...model }) {
  const roles = ["detection", "recognition", "liveness"].filter((role) => model[role]);
  const called = (role) => role[0].toUpperCase() + role.slice(1);
  const row = (name, value) => [h("dt", name), h("dd", value)];
  return h("li.card", [
    h("h3", name),
    h("p.row", [
      h("span.tag", model.model),
      calibrated ? outcome("identified", "check", "calibrated") : outcome("uncertain", "question", "not calibrated"),
    ]),
    !calibrated && h("p.hint", UNCALIBRATED),
    roles.map((role) => {
      const { engine, precision, providers } = model[role];
      const on = providers.map((provider) => provider.replace("ExecutionProvider", "")).join(", ");
      return h("div.network", [h("strong", called(role)), h("p", `${engine}, ${precision}, on ${on}`)]);
    }),
    h("details", [
      h("summary", "Details"),
      h("dl.pairs", [
        roles.map((role) => row(called(role), model[role].why)),
        row("Fingerprint", h("code", recognizer)),
        row("Dimensions", whole(dimension)),
      ]),
    ]),
  ]);
}

/** The galleries with their recognizers and links to a migration. Empty if the key cannot list galleries. */
async function users(served, signal) {
  const found = await galleries(signal);
  if (!found?.length) return null;
  const rows = found.map((gallery) => [
    h("a", { href: galleryPage(gallery.name) }, gallery.name),
    served.find((model) => model.recognizer === gallery.recognizer)?.model ?? h("code", gallery.recognizer.slice(0, 8)),
    linkButton("Migrate", galleryPage(gallery.name, "/recognizer"), { kind: "quiet", icon: "move" }),
  ]);
  return h("section.stack", [
    h("h2", "Galleries"),
    table("Recognizers of galleries", ["Gallery", "Recognizer", ""], rows),
  ]);
}
