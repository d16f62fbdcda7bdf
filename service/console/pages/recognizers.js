// Recognizers that the service has loaded, their devices, and the recognizer of each gallery.

import { all, call } from "../api.js";
import { h, icon } from "../dom.js";
import { whole } from "../numbers.js";
import { settingsHeading } from "../reports.js";
import { linkButton, loading, table } from "../ui.js";

export const title = () => "Recognizers";

export function render(params, signal) {
  return h(
    "div",
    { class: "page" },
    settingsHeading(
      "recognizers",
      "The recognizers of this service, the devices that run them, and the galleries that use them.",
    ),
    loading(async () => {
      const { models: served } = await call("GET", "/v1/models", { signal });
      return [models(served), loading(() => users(served, signal), "Loading galleries…")];
    }, "Loading recognizers…"),
  );
}

function models(served) {
  return h(
    "section",
    { class: "stack" },
    h("h2", {}, "Recognizers and devices"),
    h(
      "ul",
      { class: "cards models" },
      served.map((model) =>
        h(
          "li",
          { class: "card" },
          h("h3", {}, model.display_name),
          h(
            "p",
            { class: "row" },
            h("span", { class: "tag" }, model.model),
            h(
              "span",
              { class: `outcome ${model.calibrated ? "identified" : "uncertain"}` },
              icon(model.calibrated ? "check" : "question"),
              model.calibrated ? "calibrated" : "not calibrated",
            ),
          ),
          !model.calibrated &&
            h(
              "p",
              { class: "hint" },
              "This model has no calibration, so you can choose similarities but no risks. Run “kith models calibrate PACK --photos FOLDER”.",
            ),
          network("Detection", model.detection),
          network("Recognition", model.recognition),
          model.liveness && network("Liveness", model.liveness),
          h(
            "details",
            {},
            h("summary", {}, "Details"),
            h(
              "dl",
              { class: "pairs" },
              [
                ["Detection", model.detection],
                ["Recognition", model.recognition],
                ["Liveness", model.liveness],
              ].map(([does, role]) => role && [h("dt", {}, does), h("dd", {}, role.why)]),
              h("dt", {}, "Fingerprint"),
              h("dd", {}, h("code", {}, model.recognizer)),
              h("dt", {}, "Dimensions"),
              h("dd", {}, whole(model.dimension)),
            ),
          ),
        ),
      ),
    ),
  );
}

const network = (does, { engine, precision, providers }) =>
  h(
    "div",
    { class: "network" },
    h("strong", {}, does),
    h(
      "p",
      {},
      `${engine}, ${precision}, on ${providers.map((provider) => provider.replace("ExecutionProvider", "")).join(", ")}`,
    ),
  );

/** The galleries with their recognizers and links to a migration. Empty if the key cannot list galleries. */
async function users(served, signal) {
  const found = await all("/v1/galleries", { signal }).catch((error) => {
    if (error.code !== "forbidden") throw error;
    return [];
  });
  if (found.length === 0) return null;
  const rows = found.map((gallery) => [
    h("a", { href: `#/galleries/${encodeURIComponent(gallery.name)}` }, gallery.name),
    served.find((model) => model.recognizer === gallery.recognizer)?.model ??
      h("code", {}, gallery.recognizer.slice(0, 8)),
    linkButton("Migrate", `#/galleries/${encodeURIComponent(gallery.name)}/recognizer`, {
      kind: "quiet",
      icon: "move",
    }),
  ]);
  return h(
    "section",
    { class: "stack" },
    h("h2", {}, "Galleries"),
    table("Recognizers of galleries", ["Gallery", "Recognizer", ""], rows),
  );
}
