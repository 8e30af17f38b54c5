// Gets the document, with the key if the server wants one, and gives it to Swagger UI or Redoc.
"use strict";

const $ = (id) => document.getElementById(id);
const STORED = "ess-key";

async function begin() {
  const key = sessionStorage.getItem(STORED);
  const headers = key ? { authorization: `Bearer ${key}` } : {};
  const answer = await fetch("openapi.json", { cache: "no-store", headers });
  $("ask").hidden = answer.status !== 401;
  if (answer.status === 401) return say(key ? "This key is not known here." : "");
  if (!answer.ok) return say(`The server answered ${answer.status}.`);
  say("");
  show(await answer.json(), key);
}

function say(text) {
  $("said").textContent = text;
}

function show(described, key) {
  if (window.Redoc) {
    // Its search would run in a worker made of text, which the page's policy forbids.
    Redoc.init(described, { disableSearch: true }, $("shown"));
    return;
  }
  const ui = SwaggerUIBundle({
    spec: described,
    domNode: $("shown"),
    deepLinking: true,
    docExpansion: "list",
    queryConfigEnabled: false,
    validatorUrl: null,
    onComplete: () => key && ui.preauthorizeApiKey("key", key),
  });
}

function lost(error) {
  say(`The document cannot be shown: ${error.message}`);
}

$("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(STORED, $("key").value.trim());
  begin().catch(lost);
});
begin().catch(lost);
