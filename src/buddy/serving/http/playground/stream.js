// Reads the server's events: one JSON object for each `data:` line.

export class ServerError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

function headers(key) {
  const made = { "Content-Type": "application/json" };
  if (key) made.Authorization = `Bearer ${key}`;
  return made;
}

async function refusal(response) {
  let message = `the server answers ${response.status}`;
  try {
    message = (await response.json()).error.message;
  } catch {
    // It is no answer of this server; the status says what there is to say.
  }
  const wait = response.headers.get("Retry-After");
  if (response.status === 429 && wait) message += ` (try again in ${wait} s)`;
  return new ServerError(message, response.status);
}

export async function get(path, key) {
  const response = await fetch(path, { headers: headers(key) });
  if (!response.ok) throw await refusal(response);
  return response.json();
}

// Yields the chunks of a streamed answer until it ends or the signal is given.
export async function* chunks(body, key, signal) {
  const response = await fetch("/v1/chat/completions", {
    method: "POST",
    headers: headers(key),
    body: JSON.stringify({ ...body, stream: true }),
    signal,
  });
  if (!response.ok) throw await refusal(response);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) throw new ServerError("the connection ended before the answer did", 0);
    rest += value;
    const events = rest.split("\n\n");
    rest = events.pop();
    for (const event of events) {
      if (!event.startsWith("data: ")) continue;
      const data = event.slice(6);
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ServerError(chunk.error.message, 500);
      yield chunk;
    }
  }
}
