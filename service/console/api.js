// The service's answers, and its refusals as Problems. The key lives as long as the tab, unless the person asks that
// this computer remembers it.

import { read, write } from "./store.js";

export const KEY = "kith-key";
export const EVENTS = new EventTarget();
/** `refused`: a key is needed, or the one given is not right; its `problem` says which. `key`: there is another one, or
 * none any more. `work`: somebody brought something that is not to be lost. */

export class Problem extends Error {
  constructor(status, document) {
    super(document.detail || document.title || "The service did not say what went wrong.");
    this.status = status;
    this.code = document.code ?? "unknown";
    this.title = document.title ?? "That did not work";
    this.remedy = document.remedy ?? "";
    this.document = document;
    this.retryAfter = null; // seconds, where the service says when to come again
  }
}

export const unreachable = (cause) =>
  new Problem(0, {
    code: "unreachable",
    title: "The service does not answer",
    detail: "No answer came from this address.",
    remedy: "See whether the server runs, then try again.",
    cause: String(cause),
  });

/** A page of a proxy's, a firewall's or a sign-in's came in place of an answer. */
export const waylaid = (status) =>
  new Problem(status < 300 ? 0 : status, {
    code: "waylaid",
    title: "The service was not reached",
    detail: `Something between here and the service answered instead of it (status ${status}).`,
    remedy: "Try again in a moment. If it stays so, tell whoever runs the service: its proxy or firewall says more.",
  });

export function key() {
  return read("sessionStorage", KEY) ?? read("localStorage", KEY);
}

export function setKey(value, remember = false) {
  write("sessionStorage", KEY, remember ? null : value);
  write("localStorage", KEY, remember ? value : null);
  EVENTS.dispatchEvent(new Event("key"));
}

/**
 * Send a request; the answer's JSON, or null where it has none. `query`: left out where null or undefined; lists are
 * repeated. `json`, or `body` (a File, Blob or FormData) with `type`. `parse` reads the answer. Throws Problem, or
 * AbortError by `signal`.
 */
export async function call(method, path, { parse = JSON.parse, ...request } = {}) {
  const response = await send(method, path, request);
  return response.status === 204 ? null : await contents(response, parse);
}

async function contents(response, parse = JSON.parse) {
  const text = await response.text().catch((error) => {
    throw error.name === "AbortError" ? error : unreachable(error);
  });
  try {
    return parse(text);
  } catch {
    throw waylaid(response.status);
  }
}

/** As `call`; the Response, for files. */
export async function send(method, path, { query = {}, json, body, type, headers = {}, signal } = {}) {
  const url = new URL(path, location.origin);
  for (const [name, value] of Object.entries(query))
    for (const one of [value].flat()) if (one !== null && one !== undefined) url.searchParams.append(name, one);
  const fields = new Headers(headers);
  if (key()) fields.set("Authorization", `Bearer ${key()}`);
  if (json !== undefined) fields.set("Content-Type", "application/json");
  else if (type) fields.set("Content-Type", type);
  let response;
  try {
    response = await fetch(url, { method, headers: fields, body: json === undefined ? body : JSON.stringify(json), signal });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw unreachable(error);
  }
  if (response.ok) return response;
  const problem = await contents(response).then(
    (document) => new Problem(response.status, document ?? {}),
    (error) => {
      if (error.name === "AbortError") throw error;
      return error;
    },
  );
  problem.retryAfter = Number(response.headers.get("Retry-After")) || null;
  if (response.status === 401 && problem.code !== "waylaid") {
    const refused = new Event("refused");
    refused.problem = problem;
    EVENTS.dispatchEvent(refused);
  }
  throw problem;
}

/**
 * What `ask` answers; where the service is busy and says when to come again, it is asked again then, four times in all.
 * `onWait(seconds)` is told of each pause.
 */
export async function patiently(ask, signal, onWait) {
  for (let left = 3; ; left -= 1) {
    try {
      return await ask();
    } catch (error) {
      if (!error.retryAfter || error.retryAfter > 30 || left === 0) throw error;
      onWait?.(error.retryAfter);
      await pause(error.retryAfter * 1000, signal);
    }
  }
}

function pause(ms, signal) {
  return new Promise((resolve, reject) => {
    const timer = setTimeout(resolve, ms);
    signal?.addEventListener("abort", () => (clearTimeout(timer), reject(signal.reason)), { once: true });
  });
}

/** A name for one attempt, by which the service knows a repeated request; works on pages without https, too. */
export function attemptKey() {
  return [...crypto.getRandomValues(new Uint8Array(16))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}

/** All of a paged list: `name` is where a page holds its part. Stops at `most`. */
export async function all(path, name, { query = {}, signal, most = 10_000 } = {}) {
  const found = [];
  let cursor = null;
  do {
    const page = await call("GET", path, { query: { ...query, cursor }, signal });
    found.push(...page[name]);
    cursor = page.next;
  } while (cursor && found.length < most);
  return found;
}

/** An id as it stands between two slashes of an address. What a URL would normalize to another address is refused before
 * anything is sent: no escape helps, for "%2E%2E" is ".." to it, and "%2F" is "/" to many. */
export function part(id) {
  if (/^\.{0,2}$|[/\\\x00-\x1f\x7f-\x9f]/.test(id))
    throw new Problem(0, {
      code: "invalid_request",
      title: "No such name",
      detail: `“${id}” cannot stand in an address.`,
      remedy: "No name or id is empty, “.” or “..”, or has slashes, backslashes or control characters.",
    });
  return encodeURIComponent(id);
}

export const galleryPath = (gallery) => `/v1/galleries/${part(gallery)}`;
export const subjectPath = (gallery, subject) => `${galleryPath(gallery)}/subjects/${part(subject)}`;
export const templatePath = (gallery, subject, template) => `${subjectPath(gallery, subject)}/templates/${part(template)}`;
