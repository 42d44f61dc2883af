// Vercel's `ai` through `@ai-sdk/openai` (Responses).
import { createOpenAI } from "@ai-sdk/openai";
import { aiCases, embeddingCase } from "./ai_cases.mjs";
import { EMBEDDING_MODEL, KEY, NATIVE_URL, SCRIPT_URL, run } from "./cases.mjs";

const native = createOpenAI({ apiKey: KEY, baseURL: `${NATIVE_URL}/v1` });
const script = createOpenAI({ apiKey: KEY, baseURL: `${SCRIPT_URL}/v1` });

await run({
  ...aiCases(native, script, null /* this provider reads only summaries of reasoning */),
  embeddings: embeddingCase(native.embeddingModel(EMBEDDING_MODEL)),
});
