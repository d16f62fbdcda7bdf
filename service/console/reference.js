// Swagger UI for the API's OpenAPI document. The validator badge is off, because it sends a request to another server.

addEventListener("DOMContentLoaded", async () => {
  const service = new URL("..", import.meta.url); // a proxy may serve Kith below a path prefix
  const answer = await fetch(new URL("docs/openapi.json", service));
  const spec = { ...(await answer.json()), servers: [{ url: service.href.replace(/\/$/, "") }] };
  globalThis.SwaggerUIBundle({
    spec,
    dom_id: "#reference",
    deepLinking: true,
    validatorUrl: null,
    defaultModelsExpandDepth: 0,
    tryItOutEnabled: false,
  });
});
