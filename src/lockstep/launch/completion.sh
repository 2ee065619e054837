# Completes groups, options and keys in bash and zsh, after train.py, eval.py, predict.py and `lockstep <command>`.
[ -z "${ZSH_VERSION:-}" ] || { autoload -U +X compinit bashcompinit && compinit -u && bashcompinit; }

_lockstep() {
    local line="${COMP_LINE:0:$COMP_POINT}" command=() script="" word="" part
    for part in $line; do # up to the script, such as `uv run train.py`
        word="$part"
        [ -n "$script" ] && continue
        case "$part" in
            *train.py | *eval.py | *predict.py | train | eval | predict) script="$part" ;;
        esac
        command+=("$part")
    done
    [ -n "$script" ] || return
    case "$line" in *" ") word="" ;; esac
    # Hydra answers for a line that starts with `python <script>`
    COMPREPLY=($(COMP_LINE="python train.py${line#*"$script"}" "${command[@]}" -sc query=bash 2>/dev/null))
    [ -n "${ZSH_VERSION:-}" ] || COMPREPLY=("${COMPREPLY[@]#"${word%"${word##*=}"}"}") # in bash, = separates words
}

complete -o nospace -o default -F _lockstep lockstep python
# Keep uv's own completions; zsh lists them in _comps
[ -n "${_comps[uv]:-}" ] || complete -p uv 2>/dev/null | grep -q uv || complete -o nospace -o default -F _lockstep uv
