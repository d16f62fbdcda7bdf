// Swagger UI, on the API's description: by no server but this one, and without its badge, which asks another.

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
