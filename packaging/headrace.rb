# A formula for Homebrew on a Mac with Apple silicon. It was never run on a Mac.
#
#   scripts/build                                       makes dist/headrace-VERSION.tar.gz
#   brew tap-new you/local
#   cp packaging/headrace.rb "$(brew --repository you/local)/Formula/"
#   HOMEBREW_HEADRACE_SDIST=$PWD/dist/headrace-VERSION.tar.gz brew install you/local/headrace
#   brew services start headrace
#
# Homebrew would build every package from source, which MLX's GPU library can't be in a sandbox without Xcode. So the
# wheels are installed that constraints.txt names.
class Headrace < Formula
  desc "Inference server for MLX language and vision-language models"
  url "file://#{ENV.fetch("HOMEBREW_HEADRACE_SDIST", "")}"
  license "Apache-2.0"

  depends_on arch: :arm64
  depends_on macos: :sonoma
  depends_on "python@3.13"

  def install
    # Else pip may take MLX for macOS 15 on macOS 26, see scripts/setup.
    ENV["SYSTEM_VERSION_COMPAT"] = "0"
    system Formula["python@3.13"].opt_bin/"python3.13", "-m", "venv", libexec
    pip = [libexec/"bin/python", "-m", "pip", "install", "--no-input", "-c", buildpath/"constraints.txt"]
    system(*pip, buildpath)
    # Without its requirements, see the extra `vision` in pyproject.toml.
    system(*pip, "--no-deps", "mlx-vlm")
    bin.install_symlink libexec/"bin/headrace"
  end

  service do
    run ["/bin/sh", "-c", '/usr/bin/caffeinate -s -w $$ & exec "$@"', "headrace", opt_bin/"headrace", "serve"]
    keep_alive crashed: true
    process_type :interactive
    log_path var/"log/headrace.log"
    error_log_path var/"log/headrace.log"
  end

  test do
    system bin/"headrace", "--version"
  end
end
