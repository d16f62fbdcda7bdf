// Swagger UI for the API's OpenAPI document. The validator badge is off, because it sends a request to another server.

import { address } from "./store.js";

document.documentElement.classList.toggle("dark-mode", matchMedia("(prefers-color-scheme: dark)").matches);
addEventListener("DOMContentLoaded", async () => {
  const answer = await fetch(address("/openapi.json"));
  const spec = { ...(await answer.json()), servers: [{ url: address("/").href.replace(/\/$/, "") }] };
  globalThis.SwaggerUIBundle({
    spec,
    dom_id: "#reference",
    deepLinking: true,
    validatorUrl: null,
    defaultModelsExpandDepth: 0,
    tryItOutEnabled: false,
  });
});
