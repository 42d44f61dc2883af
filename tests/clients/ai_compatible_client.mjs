// Vercel's `ai` through `@ai-sdk/openai-compatible` (chat completions).
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { aiCases, embeddingCase } from "./ai_cases.mjs";
import { EMBEDDING_MODEL, KEY, NATIVE_URL, SCRIPT_URL, run } from "./cases.mjs";

const settings = { name: "dynamo", apiKey: KEY, includeUsage: true, supportsStructuredOutputs: true };
const native = createOpenAICompatible({ ...settings, baseURL: `${NATIVE_URL}/v1` });
const script = createOpenAICompatible({ ...settings, baseURL: `${SCRIPT_URL}/v1` });

await run({
  ...aiCases(native, script),
  embeddings: embeddingCase(native.embeddingModel(EMBEDDING_MODEL)),
});
