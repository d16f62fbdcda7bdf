// Report each field that the console reads and the answer of the service lacks, as a debug message "no field METHOD PATH FIELDS".

if (location.pathname.endsWith("/console")) {
  const [ask, text, parse] = [globalThis.fetch, Response.prototype.text, JSON.parse];
  const requests = new WeakMap(); // by response
  const origins = new Map(); // request of each answer, by its text
  const proxies = new WeakMap();
  const LANGUAGE = ["then", "toJSON"]; // await and JSON.stringify ask for these

  const watched = (value, request, at) => {
    if (value === null || typeof value !== "object" || value instanceof Node || JSON.isRawJSON?.(value)) return value;
    if (!proxies.has(value)) {
      const get = (target, name) => {
        if (typeof name === "symbol") return target[name];
        const inside = Array.isArray(target) ? at : `${at}.${name}`;
        if (!(name in target) && !Array.isArray(target) && !LANGUAGE.includes(name))
          console.debug(`no field ${request} ${inside}`);
        return Object.hasOwn(target, name) ? watched(target[name], request, inside) : target[name];
      };
      const proxy = new Proxy(value, { get });
      proxies.set(value, proxy);
      proxies.set(proxy, proxy);
    }
    return proxies.get(value);
  };

  globalThis.fetch = async (url, options) => {
    const response = await ask(url, options);
    requests.set(response, `${options?.method ?? "GET"} ${new URL(url, location).pathname}`);
    return response;
  };
  Response.prototype.text = async function () {
    const said = await text.call(this);
    if (this.ok) origins.set(said, requests.get(this));
    return said;
  };
  const { open } = XMLHttpRequest.prototype;
  const { get: answer } = Object.getOwnPropertyDescriptor(XMLHttpRequest.prototype, "response");
  XMLHttpRequest.prototype.open = function (method, url) {
    requests.set(this, `${method} ${new URL(url, location).pathname}`);
    return open.call(this, method, url);
  };
  Object.defineProperty(XMLHttpRequest.prototype, "response", {
    get() {
      return this.status < 300 ? watched(answer.call(this), requests.get(this), "") : answer.call(this);
    },
  });
  JSON.parse = (said, ...reviver) => {
    const value = parse(said, ...reviver);
    return origins.has(said) ? watched(value, origins.get(said), "") : value;
  };
}
