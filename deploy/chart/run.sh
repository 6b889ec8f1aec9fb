# Runs a module of Kvasir as the instance that the pod is called: sh run.sh MODULE [FLAG]
# The instance's file has NAME=value lines, whose values are taken as they are.
while IFS= read -r line; do export "$line"; done < "${KVASIR_INSTANCE_FILE:-/run/kvasir/instance.env}"
export KVASIR_BUS__URL="${KVASIR_NATS_ADDRESS:-$KVASIR_BUS__URL}"
exec "${KVASIR_PYTHON:-python}" -m "$@" "$POD_NAME"
