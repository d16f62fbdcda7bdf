// Requests to the service; errors are Problems. The key lasts as long as the tab, unless the user stores it on this
// computer.

import { address, read, write } from "./store.js";

export const KEY = "kith-key";
export const EVENTS = new EventTarget();
/** `refused`: a key is missing or invalid, see its `problem`. `key`: the key changed or was removed. `work`: the page has
 * unsaved input. */

export class Problem extends Error {
  constructor(status, document) {
    super(document.detail || document.title || "The service sent no description of the error.");
    this.status = status;
    this.code = document.code ?? "unknown";
    this.title = document.title ?? "The request failed";
    this.remedy = document.remedy ?? "";
    this.document = document;
    this.retryAfter = null; // seconds until the next attempt, if the service sends it
  }
}

export const unreachable = () =>
  new Problem(0, {
    code: "unreachable",
    title: "The service does not answer",
    detail: "The server sent no answer.",
    remedy: "Check that the server runs, then try again.",
  });

/** A proxy, firewall or sign-in page answered instead of the service. */
export const waylaid = (status) =>
  new Problem(status < 300 ? 0 : status, {
    code: "waylaid",
    title: "The service was not reached",
    detail: `A proxy or firewall answered instead of the service (status ${status}).`,
    remedy: "Try again in a moment. If the error stays, ask the operator to check the logs of the proxy.",
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
 * Send a request to a path such as "/v1/jobs" and return the JSON of the answer, or null if it is empty. `query` skips null and undefined, and repeats
 * lists. The content is `json`, or `body` (a File, Blob or FormData) with `type`. `parse` reads the answer. Throws Problem,
 * or AbortError by `signal`.
 */
export async function call(method, path, { parse = JSON.parse, ...request } = {}) {
  const response = await send(method, path, request);
  return response.status === 204 ? null : await contents(response, parse);
}

async function contents(response, parse = JSON.parse) {
  const text = await response.text().catch((error) => {
    throw error.name === "AbortError" ? error : unreachable();
  });
  try {
    return parse(text);
  } catch {
    throw waylaid(response.status);
  }
}

/** Like `call`, but return the Response, for files. */
export async function send(method, path, { query = {}, json, body, type, headers = {}, signal } = {}) {
  const url = address(path);
  for (const [name, value] of Object.entries(query))
    for (const one of [value].flat()) if (one !== null && one !== undefined) url.searchParams.append(name, one);
  const fields = new Headers(headers);
  if (key()) fields.set("Authorization", `Bearer ${key()}`);
  if (json !== undefined) fields.set("Content-Type", "application/json");
  else if (type) fields.set("Content-Type", type);
  let response;
  try {
    response = await fetch(url, {
      method,
      headers: fields,
      body: json === undefined ? body : JSON.stringify(json),
      signal,
    });
  } catch (error) {
    throw error.name === "AbortError" ? error : unreachable();
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
  throw told(problem);
}

/** Report a missing or invalid key. Returns the problem. */
export function told(problem) {
  if (problem.status === 401 && problem.code !== "waylaid")
    EVENTS.dispatchEvent(Object.assign(new Event("refused"), { problem }));
  return problem;
}

/** Return the result of `ask`, with up to three retries: after the pause that a busy service requests, or a second after the
 * network broke. An enrollment, which must not take effect twice, needs an idempotency key. `onWait(seconds)` is called
 * before each pause. */
export async function patiently(ask, signal, onWait) {
  for (let left = 3; ; left -= 1) {
    try {
      return await ask();
    } catch (error) {
      const seconds = error.code === "unreachable" ? 1 : error.retryAfter;
      if (!seconds || seconds > 30 || left === 0) throw error;
      onWait?.(seconds);
      await pause(seconds * 1000, signal);
    }
  }
}

function pause(ms, signal) {
  return new Promise((resolve, reject) => {
    const timer = setTimeout(resolve, ms);
    signal?.addEventListener("abort", () => (clearTimeout(timer), reject(signal.reason)), { once: true });
  });
}

/** A function that runs `act(until)`, of which only the latest run counts: a run aborts the one before, which then rejects with
 * AbortError, as all do when `signal` is aborted. */
export function newest(signal) {
  let last = new AbortController();
  return async (act) => {
    last.abort();
    last = new AbortController();
    const until = AbortSignal.any([signal, last.signal]);
    const result = await act(until);
    until.throwIfAborted();
    return result;
  };
}

/** An idempotency key. Works on pages without https. */
export function attemptKey() {
  return [...crypto.getRandomValues(new Uint8Array(16))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}

/** All items of a paged list. Stops at `most`. */
export async function all(path, { query = {}, signal, most = 10_000 } = {}) {
  const found = [];
  let cursor = null;
  do {
    const page = await call("GET", path, { query: { ...query, cursor }, signal });
    found.push(...page.data);
    cursor = page.next;
  } while (cursor && found.length < most);
  return found;
}

/** An id as one path segment. Throws Problem for ids that URLs normalize to another path, escaped or not: "%2E%2E" is "..",
 * and many servers read "%2F" as "/". */
export function part(id) {
  if (/^\.{0,2}$|[/\\\x00-\x1f\x7f-\x9f]/.test(id))
    throw new Problem(0, {
      code: "invalid_request",
      title: "Invalid name",
      detail: `“${id}” cannot be part of an address.`,
      remedy:
        "Names and ids cannot be empty, “.” or “..”, and cannot contain slashes, backslashes or control characters.",
    });
  return encodeURIComponent(id);
}

export const galleryPath = (gallery) => `/v1/galleries/${part(gallery)}`;
export const subjectPath = (gallery, subject) => `${galleryPath(gallery)}/subjects/${part(subject)}`;
export const decoysPath = (gallery, subject) => `${subjectPath(gallery, subject)}/decoys`;
export const templatePath = (gallery, subject, template) =>
  `${subjectPath(gallery, subject)}/templates/${part(template)}`;

/** Addresses of the console's own pages. */
export const galleryPage = (gallery, rest = "") => `#/galleries/${encodeURIComponent(gallery)}${rest}`;
export const subjectPage = (gallery, subject) => galleryPage(gallery, `/subjects/${encodeURIComponent(subject)}`);
export const enrollPage = (gallery, subject) =>
  `#/enroll?${new URLSearchParams({ gallery, ...(subject !== undefined && { subject }) })}`;
