// Swagger UI for the API's OpenAPI document. The validator badge is off, because it sends a request to another server.

addEventListener("DOMContentLoaded", () => {
  globalThis.SwaggerUIBundle({
    url: "/docs/openapi.json",
    dom_id: "#reference",
    deepLinking: true,
    validatorUrl: null,
    defaultModelsExpandDepth: 0,
    tryItOutEnabled: false,
  });
});
