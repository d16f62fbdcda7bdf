// Webhooks: who receives which events, and whether it does. The command line creates them.

import { call, part } from "../api.js";
import { careful } from "../dialogs.js";
import { h } from "../dom.js";
import { counted, when } from "../numbers.js";
import { renewedList, settingsHeading } from "../reports.js";
import { button, empty, outcome, toast } from "../ui.js";

export const title = () => "Webhooks";

const NONE =
  "“kith webhook create” sends decisions, enrollments and jobs to an address that the operator allows in KITH_WEBHOOK_HOSTS.";

export function render(params, signal) {
  const load = async () => (await call("GET", "/v1/webhooks", { signal })).data;
  const look = () => list.look();
  const nothing = () => empty("upload", "No webhooks yet", NONE);
  const list = renewedList("ul.stack", load, (one) => card(one, look), nothing, signal);
  const lead = "The service sends events, such as a stranger at a door, to the addresses listed here.";
  return h("div.page", [settingsHeading("webhooks", lead, button("Refresh", look)), list.elements]);
}

function card(one, again) {
  const name = one.name ?? new URL(one.url).host;
  const path = `/v1/webhooks/${part(one.id)}`;
  const test = async () => {
    const answer = await call("POST", `${path}/test`);
    toast(answer.delivered ? `“${name}” accepted the test.` : `The test failed: ${answer.error}.`);
  };
  const text = "It receives nothing from now on, and its pending events are not sent.";
  const question = () => [`Delete the webhook “${name}”?`, text, "Delete"];
  const remove = async () => {
    await call("DELETE", path);
    toast(`“${name}” was deleted.`);
    again();
  };
  const { failing_since: since, waiting_count: waiting } = one;
  const [kind, picture, word] = one.off
    ? ["unknown", "close", "switched off"]
    : since
      ? ["uncertain", "jobs", "failing"]
      : ["identified", "check", "working"];
  const facts = [
    (one.types ?? ["all events"]).join(", "),
    one.galleries === null ? "all galleries" : one.galleries.join(", "),
    since && `since ${when(since)}: ${one.error}`,
    waiting > 0 && `${counted(waiting, "event")} after its position`,
  ];
  return h("li.card", [
    h("div.row.between", [h("h2", name), outcome(kind, picture, word)]),
    h("p", h("code", one.url)),
    h("p.hint", facts.filter(Boolean).join(" · ")),
    h("div.actions", [button("Send a test", test), careful("Delete", question, remove)]),
  ]);
}
