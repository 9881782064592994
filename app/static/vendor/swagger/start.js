window.addEventListener("DOMContentLoaded", () => {
  SwaggerUIBundle({
    url: "/openapi.json",
    dom_id: "#swagger-ui",
    deepLinking: true,
    validatorUrl: null,
    requestInterceptor: (request) => {
      const token = document.querySelector("meta[name=csrf-token]").content;
      if (token) request.headers["X-CSRF-Token"] = token;
      return request;
    },
  });
});
