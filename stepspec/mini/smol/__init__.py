"""The pair `smol`: SmolLM2-135M-Instruct trained to reason in steps, and a draft made of its layers."""
